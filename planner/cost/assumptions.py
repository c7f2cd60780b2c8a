"""Every constant of the cost model, each with its source or named as an assumption.

The values are starting points that a calibration may replace: build another `Assumptions` and hand it to `CostModel`.
"""

from planner.record import record


@record
class Assumptions:
    """Efficiencies are fractions of datasheet figures; a paced device delivers what it declares (fraction 1)."""

    gemm_ceiling: float = 0.85
    """Best matmul share of peak: 0.80-0.87 on A100, H100 and GH200 (stas00/ml-engineering, MAMF table)."""

    gemm_half_tokens: float = 64.0
    """Rows at which a matmul reaches half its ceiling: read off aiconfigurator's bf16 GEMM rows (A100, H100, L40S)."""

    gemm_half_width: float = 200.0
    """Columns at which it does: same rows, 1024 -> 0.68, 2048 -> 0.78, 4096 -> 0.83 of peak at 8192 rows."""

    train_products: float = 0.9
    """Share of the measured product rate that a trainer reaches: 1 / 1.10-1.12 on A100-40, A100-80 and H100 (llm-foundry)."""

    train_attention: float = 1.0
    """Share of its kernel's rate that attention reaches in a trainer: FlashAttention-2's own end-to-end runs on A100 (its Table 1)
    take 4 % less time than this says, our trainer on H200 5-12 % less. llm-foundry's kernel of 2023 reached 0.62."""

    attention_backward: float = 0.87
    """FLOP/s of attention's backward pass over the forward pass's: FlashAttention-2 322 / 370 TFLOP/s and FlashAttention-3 561 / 648
    (H100, heads of 128, 16k tokens, no mask; FlashAttention-3, Fig. 5 and 6); on A100 at most 63 and 73 % of peak."""

    flash_2_share: float = 0.57
    """FlashAttention-2's rate over FlashAttention-3's on H100, forward and backward: 0.54-0.58 from 2k to 16k tokens (same figures)."""

    cudnn_share: float = 0.9
    """cuDNN's over FlashAttention-3's: 0.88-0.93 forward with a mask and backward, 2k to 16k (same figures)."""

    graph_credit_s: float = 1.8e-5
    """Launch time a layer that replaying a CUDA graph saves of the kernels' own floors: fitted to vLLM on H100, tested on H200."""

    prefill_share: float = 0.7
    """Share of a new sample's prefill that running samples feel (chunked into their steps): fitted and tested likewise."""

    hbm_efficiency: float = 0.8
    """Share of HBM bandwidth that decode reaches (aiconfigurator's empirical scaling factor for every NVIDIA part)."""

    link_efficiency: float = 0.8
    """Share of link bandwidth a large collective reaches: NCCL broadcast of 3 GiB between two H200, 362 of 450 GB/s."""

    host_s_per_sample: float = 2e-5
    """Scheduler and sampler time a running sample costs each decode step (vLLM 0.26 on one H100, 7B, 256 running)."""

    prefill_chunk_tokens: int = 2048
    """Tokens a prefill forward pass carries (assumption: an engine's usual chunk)."""

    kv_sigmas: float = 2.0
    """Margin for the fluctuation of KV use over the running batch, in standard deviations (assumption)."""

    max_running: int = 1024
    """Most samples one replica decodes at once (assumption: vLLM's default on large cards)."""

    rollout_memory_share: float = 0.9
    """Share of memory an engine may take (vLLM's default `gpu_memory_utilization`)."""

    train_memory_share: float = 0.94
    """Share of memory a trainer may take, the rest is fragmentation (assumption)."""

    overhead_bytes: float = 3758096384.0
    """CUDA context, NCCL buffers, graphs (aiconfigurator `other_mem`), never more than `overhead_share` of memory."""

    overhead_share: float = 0.05
    """Cap of that overhead on small devices (assumption)."""

    bucket_bytes: float = 1e9
    """Staging buffer of a weight update, or the weights if smaller (assumption)."""

    update_efficiency: float = 0.2
    """Share of link bandwidth a weight update reaches: AReaL-Hex table 2 gives 0.15-0.23 (H800), 0.17-0.23 across."""

    update_fixed_s: float = 1.5
    """Fixed seconds an update takes on GPUs: intercept of table 2 over the model size, 1.3-1.7 s."""

    update_fixed_bytes: float = 3.55e9
    """Weights of the smallest model of that table; below, the fixed part shrinks with the weights (assumption)."""

    swap_s: float = 0.04
    """Seconds for which a replica stops for weights that came into its second buffer: 0.040 and 0.037 s, vLLM with 1.5B and 7B on
    H200 (docs/gpu-runs.md)."""

    direct_efficiency: float = 0.45
    """Share of link bandwidth that such a transfer reaches, checksums included: 178 and 231 of 450 GB/s, 3.55 and 15.2 GB
    (same table)."""

    delta_changed_share: float = 0.02
    """Share of bf16 weights that one optimiser step changes: their spacing is 2^-7 of their size and hides most of a step at RL
    learning rates. About 0.01, never above 0.02 (Hugging Face TRL, delta weight sync, 2026); below 0.01 (arXiv 2602.03839)."""

    delta_position_bytes: float = 4.0
    """Bytes that say which element changed, beside its new value (assumption: 32-bit positions, not compressed)."""

    update_fixed_local_s: float = 0.02
    """The same on paced and CPU devices, which map a file (assumption)."""

    head_chunk_bytes: float = 4294967296.0
    """Most bytes of logits and their gradient that our trainer holds at once: two chunks of 2 GiB (`runtime/rl/train/room.py`)."""

    host_replica_bytes: float = 4.8e8
    """Resident memory of a replica's own process and its warden: 0.47 + 0.012 GB (docs/gpu-runs.md, SmolLM2-135M)."""

    host_engine_bytes: float = 1.9e9
    """Resident memory of an engine's process a device, weights apart: 1.9 GB (same reading; its weights were 0.3 GB)."""

    host_trainer_bytes: float = 1.9e9
    """The same of a trainer's process a device (assumption: as an engine's, both hold torch and a CUDA context)."""

    host_memory_share: float = 0.9
    """Share of a machine's memory that a run may take; the rest is the system's and the page cache's (assumption)."""

    def overhead(self, memory_bytes: float) -> float:
        """Bytes of a device's memory that are gone before weights."""
        return min(self.overhead_bytes, self.overhead_share * memory_bytes)
