"""BASE_BITS = 4: the frozen model under LoRA's adapters has 4 bits a weight (QLoRA, 2305.14314).

bitsandbytes rounds the linear layers but the LM head to NF4 while MODEL is loaded, 64 weights to a
scale, and the scales to 8 bits: 4.13 bits a weight. Embeddings, norms and the head have DTYPE, in
which all products are computed, from a layer's converted weights; on a GPU a few rows at a time are
multiplied by a kernel that reads 4 bits. W + s B A would have to be rounded to 4 bits again,
so adapters run beside their layers, also while tokens are sampled. Sampler, trainer and reference
run the same layers, and check_sampler finds whether they differ by more than rounding.
"""

import importlib.util

NEEDED = "bitsandbytes", "accelerate"


def load_in_4_bits(load, name, dtype, **place):
    """Returns load(name, ...), models.whole_model's model, in 4 bits; `dtype` is that of products
    and of all that is not a linear layer."""
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        raise SystemExit(f"BASE_BITS = 4 needs {missing[0]}: pip install -e .[bits]")
    import bitsandbytes
    from transformers import BitsAndBytesConfig

    rounding = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = load(name, dtype=dtype, quantization_config=rounding, **place)
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            # On CPUs with bfloat16 it would sample by another product than it trains
            layer.support_avx512bf16_for_cpu = False
    return model


def is_in_4_bits(model):
    return getattr(model, "is_loaded_in_4bit", False)
