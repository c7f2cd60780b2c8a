"""A compact decoder in plain torch for the Llama, Qwen2 and Qwen3 families, and its files.

Parameter names are those of Hugging Face, so safetensors move in both directions. Importing this package imports torch.
"""

from runtime.rl.model.cache import KVCache
from runtime.rl.model.config import DecoderConfig, RopeScaling
from runtime.rl.model.decoder import Decoder
from runtime.rl.model.files import DTYPES, build_seeded, load_config, load_pretrained, save_pretrained

__all__ = [
    "DTYPES",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "RopeScaling",
    "build_seeded",
    "load_config",
    "load_pretrained",
    "save_pretrained",
]
