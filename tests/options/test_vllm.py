"""vLLM's policy against a transformers forward: what it samples, and whose weights it holds; then
in the trainer's ranks, and in a worker. `make vllm-test` installs vLLM and runs this in 6 minutes.
"""

import itertools
import os
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm")
from processes import QUICK, command_of, launch, learned, start

from demo import free_port
from grpo.commands.tiny_model import make_tokenizer
from grpo.logp_checks import MISMATCH
from grpo.models import has_bfloat16
from grpo.options.vllm_policy import VLLMPolicy
from grpo.sample import Prompt
from tasks import arithmetic

pytestmark = pytest.mark.vllm
V = 400  # ids of the tokenizer that these models stand for
CONTEXT = 256
EOS = {11, 12, 13, 14, 15, 16, 17, 18}  # many, so that completions do end
CONFIG_EOS = 5  # in the model's config, which must not count
# float32, measured on a CPU: at most 4e-5 in 5 000 log-probs, where two models differ by 15 and
# more. A GPU may multiply in TF32; the number for that is a guess
NOISE = 0.05 if has_bfloat16("cuda" if torch.cuda.is_available() else "cpu") else 2e-4
LONG = [20 + i % 300 for i in range(140)]  # over one block of the prefix cache, of 128 tokens
PROMPTS = [LONG, [30, 31, 32, 33]]
CONSTANTS = {"GROUP_SIZE": 8, "SAMPLE_BATCH": 256, "STOP_TOKENS": [], "STOP_STRINGS": [], "SEED": 0}
CONSTANTS |= {"MAX_PROMPT_TOKENS": 200, "MAX_COMPLETION_TOKENS": CONTEXT - 200, "DTYPE": "float32"}
CONSTANTS |= {"VLLM_CACHE_GB": 0.2}
IDS = {f"id {number}": number for number in range(V)}
TOKENIZER = SimpleNamespace(eos_token_id=11, get_vocab=lambda: IDS)  # no text is asked for


def make_model(*, tied, rows, seed):
    """-> a random Qwen2; no parameter is 0 or 1, so that each matters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,  # 32 a head: on a CPU vLLM has no attention for 8 or 16
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=CONFIG_EOS,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.generation_config.update(do_sample=True, top_k=2, temperature=0.5, repetition_penalty=2.0)
    return model


def weights(model):
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def log_probs(model, prompt, ids, temperature=1.0):
    """-> (T, V) log-probs after the prompt, over the tokenizer's ids alone."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, :V]
    return torch.log_softmax(logits / temperature, -1)


def distance(model, prompt, ids, logps, temperature=1.0):
    """-> the largest difference of `logps` from the model's."""
    exact = log_probs(model, prompt, ids, temperature).gather(1, torch.tensor(ids)[:, None])
    return (exact[:, 0] - torch.tensor(logps)).abs().max().item()


class Case:
    def __init__(self, folder, *, tied, rows):
        self.old = make_model(tied=tied, rows=rows, seed=0)
        self.new = make_model(tied=tied, rows=rows, seed=1)
        self.old.save_pretrained(folder)
        constants = SimpleNamespace(**CONSTANTS | {"MODEL": str(folder)})
        self.policy = VLLMPolicy(constants, TOKENIZER)
        self.policy.eos_ids = sorted(EOS)

    def sample(self, prompts, *, group_size=8, max_new_tokens=40, temperature=0.8, seed=0):
        groups = self.policy.stream(
            itertools.starmap(Prompt, enumerate(prompts)),
            group_size=group_size,
            max_sequences=len(prompts) * group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        groups = dict(groups)
        return [groups[i] for i in range(len(prompts))]

    def distances(self, model):
        """-> how far from `model` are (sampled log-probs at 0.8, scores at 1), over PROMPTS."""
        sampled, scored = [], []
        for prompt, group in zip(PROMPTS, self.sample(PROMPTS), strict=True):
            sampled += [distance(model, prompt, c.ids, c.logps, 0.8) for c in group]
            ids = group[0].ids
            scored.append(distance(model, prompt, ids, self.policy.logps(prompt, ids)))
        return max(sampled), max(scored)


@pytest.fixture(scope="module", params=["tied, padded", "untied"])
def shared(request, tmp_path_factory):
    """One policy for the tests of a parameter: it takes seconds to start."""
    tied = request.param == "tied, padded"
    return Case(tmp_path_factory.mktemp("model"), tied=tied, rows=416 if tied else V)


@pytest.fixture
def case(shared):
    """-> the Case, with the old weights."""
    shared.policy.load(weights(shared.old))
    return shared


def test_the_weights_at_the_start_are_the_models(shared):
    # Runs first in its module's order: nothing was loaded yet
    assert max(shared.distances(shared.old)) < NOISE


def test_the_log_probs_are_those_of_the_sampled_distribution(case):
    groups = case.sample(PROMPTS, group_size=16)
    assert [len(group) for group in groups] == [16, 16]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            assert len(one.ids) == len(one.logps) and max(one.ids) < V
            assert distance(case.old, prompt, one.ids, one.logps, 0.8) < NOISE
        assert len({tuple(one.ids) for one in group}) > 8  # each has another seed
    assert case.sample(PROMPTS, group_size=16) == groups
    assert case.sample(PROMPTS, group_size=16, seed=1) != groups


def test_a_completion_ends_with_eos_unless_it_is_cut(case):
    groups = case.sample(PROMPTS, group_size=64) + case.sample([LONG], group_size=512)
    completions = [one for group in groups for one in group]
    for one in completions:
        assert not EOS & set(one.ids[:-1])
        assert one.truncated == (one.ids[-1] not in EOS)
        assert len(one.ids) == 40 or not one.truncated
    assert 0 < sum(one.truncated for one in completions) < len(completions)
    assert any(CONFIG_EOS in one.ids[:-1] for one in completions)  # it does not end them
    (group,) = case.sample([LONG], group_size=4096, max_new_tokens=1)
    assert {one.truncated for one in group} == {True, False}  # EOS in the last place counts


def streamed(case, lengths, *, rows, group_size=4):
    """-> (keys as their groups end, sequences in flight after each step) of prompts whose
    completions have these lengths at most: by the room that their prompt leaves."""
    policy, flight = case.policy, []
    engine = policy.llm.llm_engine
    step = engine.step

    def note():
        outputs = step()
        flight.append(engine.get_num_unfinished_requests())
        return outputs

    prompts = (Prompt(key, [20 + key] * (CONTEXT - length)) for key, length in enumerate(lengths))
    settings = {"max_new_tokens": CONTEXT, "temperature": 1.0, "seed": 0}
    policy.eos_ids, eos_ids, engine.step = [], policy.eos_ids, note
    try:
        groups = policy.stream(prompts, group_size=group_size, max_sequences=rows, **settings)
        ended = [(key, {len(one.ids) for one in group}) for key, group in groups]
    finally:
        policy.eos_ids, engine.step = eos_ids, step
    assert all(found == {lengths[key]} for key, found in ended)
    return [key for key, _ in ended], flight


def test_a_group_leaves_when_it_ends_and_another_takes_its_place(case):
    """Three groups at once: batch after batch takes 40 + 40 + 40 steps."""
    ended, flight = streamed(case, [40, 5, 5, 40, 5, 5, 5, 40, 5], rows=12)
    assert ended[:2] == [1, 2] and ended.index(4) < ended.index(0)
    assert max(flight) <= 12 and flight[-1] == 0
    assert len(flight) == 4 * 5 + 40  # the last long one begins after four short ones


def test_a_load_takes_every_parameter(case):
    old, new = weights(case.old), weights(case.new)
    mixed = make_model(
        tied=case.old.config.tie_word_embeddings, rows=case.old.config.vocab_size, seed=0
    )
    for name in old:
        case.policy.load(dict(reversed(old.items())) | {name: new[name]})  # in any order
        mixed.get_parameter(name).data.copy_(new[name])
        sampled, scored = case.distances(mixed)
        assert max(sampled, scored) < NOISE, name
        assert min(case.distances(case.old)) > 10 * NOISE, name  # or this would show nothing
        mixed.get_parameter(name).data.copy_(old[name])


def test_a_load_that_does_not_fit_raises_and_changes_nothing(case):
    new, norm = weights(case.new), "model.norm.weight"
    bias = "model.layers.0.self_attn.o_proj.bias"  # vLLM skips biases it does not know
    misfits = {
        "model.norm.weight is missing": {
            name: tensor for name, tensor in new.items() if name != norm
        },
        "o_proj.bias is .* expected missing": new | {bias: torch.zeros(64)},
        r"is \(65,\), expected \(64,\)": new | {norm: torch.zeros(65)},
        "model.embed_tokens.weight": new | {"model.embed_tokens.weight": torch.zeros(V - 1, 64)},
    }
    for message, tensors in misfits.items():
        with pytest.raises(ValueError, match=message):
            case.policy.load(tensors)
    assert max(case.distances(case.old)) < NOISE


def test_broken_weights_are_told(case):
    # Runs last in its module's order: NaN stays in the KV cache, where vLLM multiplies it by 0
    case.policy.load({name: tensor * float("nan") for name, tensor in weights(case.new).items()})
    with pytest.raises(RuntimeError, match="not finite"):
        case.sample(PROMPTS)


# --- In the trainer's ranks -------------------------------------------------------------
@pytest.fixture
def constants(tmp_path):
    """-> those of a short run that samples with vLLM."""
    tokenizer, model = make_tokenizer(arithmetic), make_model(tied=True, rows=416, seed=0)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own = {"MODEL": str(tmp_path / "model"), "RUN_DIR": str(tmp_path / "run"), "REF_SERVER": None}
    own |= {"TASK": "even"}  # random text earns different rewards
    own |= {"SAMPLER": "vllm", "VLLM_CACHE_GB": 0.2, "LEARNING_RATE": 1e-2}
    return QUICK | own | {"MAX_PROMPT_TOKENS": 96, "MAX_COMPLETION_TOKENS": 16}


@pytest.mark.parametrize("ranks, changes", [
    (1, {}),
    (1, {"LORA_RANK": 4, "STOP_STRINGS": ["7"]}),
    (2, {"UPDATES_PER_ROLLOUT": 2}),
])  # fmt: skip
def test_ranks_sample_and_resume(constants, tmp_path, ranks, changes):
    """A second main() in the process needs the process group, which vLLM would destroy."""
    first = constants | changes
    second = first | {"STEPS": 6}
    command = command_of("grpo_ref_split", first, second)
    output = launch(ranks, command, tmp_path / "log")
    steps = learned(first["RUN_DIR"])
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    checked = [record["sampler_k3"] for record in steps if "sampler_k3" in record]
    assert len(checked) == (4 if changes.get("UPDATES_PER_ROLLOUT") else 6)
    assert max(checked) < 1e-9 and min(r["grad_norm"] for r in steps) > 1e-4
    assert "resumes" in output and "Traceback" not in output
    chatter = [line for line in output.splitlines() if re.search("vllm", line)]
    assert not chatter
    threads = re.findall(r"(\d+) CPU threads a rank", output)
    assert set(threads) == {str(max(1, len(os.sched_getaffinity(0)) // ranks))}


# --- In a worker ------------------------------------------------------------------------
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_trainer_learns_from_what_vllm_sampled(constants, tmp_path, lora_rank):
    """Each pull has its proof."""
    trainer = constants | {
        "LORA_RANK": lora_rank,
        "PUBLISH_STEPS": 1,
        "TRAINER": f"http://127.0.0.1:{free_port()}",
        "TASK": "slow",
        "STEPS": 8,  # a slow worker skips policies
    }
    presets = {"grpo_ref_split": trainer | {"SAMPLER": "torch"}, "grpo_ref_split:worker": trainer}
    processes, logs = {}, {role: tmp_path / f"{role}.log" for role in presets}
    for role, preset in presets.items():
        processes[role] = start(command_of(role, preset), logs[role], OMP_NUM_THREADS="1")
    done = processes["grpo_ref_split"].wait(240)
    assert done == 0, "\n".join(log.read_text() for log in logs.values())
    assert processes["grpo_ref_split:worker"].poll() is None
    steps = learned(trainer["RUN_DIR"])
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps[0][MISMATCH] < 1e-4 and max(r["grad_norm"] for r in steps[1:]) > 1e-4
    assert max(r["staleness_max"] for r in steps) > 0  # it samples ahead
    proved = re.findall(r"policy (\d+) of run-", logs["grpo_ref_split:worker"].read_text())
    assert len(proved) > 2 and proved == sorted(proved)
