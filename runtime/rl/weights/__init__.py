"""Weight generations: immutable, numbered, hashed folders of safetensors."""

from runtime.rl.weights.generation import (
    ChainReader,
    GenerationWriter,
    collect,
    generation_folder,
    list_generations,
    read_generation,
    write_generation,
)

__all__ = [
    "ChainReader",
    "GenerationWriter",
    "collect",
    "generation_folder",
    "list_generations",
    "read_generation",
    "write_generation",
]
