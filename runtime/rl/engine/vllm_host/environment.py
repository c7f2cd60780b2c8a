"""Environment variables of the engine's process, set before vllm is imported. Pure."""

import math
from collections.abc import Mapping, MutableMapping
from typing import Any


def prepare(env: MutableMapping[str, str], spec: Mapping[str, Any]) -> None:
    """Quiet, on loopback, in one process where there is one device, with the CPU's KV cache of the size asked for."""
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process: nothing else to end
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_PLUGINS": "",  # only plugins that are named are loaded: none
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env.update(fixed)
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it compiles with nvcc, which a machine may lack
    if spec["eager"]:
        env["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles small functions even so, 20 s of a CPU's start
    if spec["device"] == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(spec["kv_cache_bytes"] / 2**30)))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer shares the cores
        env["OMP_NUM_THREADS"] = str(spec["threads"])
