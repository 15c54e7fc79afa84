"""docs/learn.md: its numbers are what docs/learn.py prints, its curves what the loss computes."""

import ast
import contextlib
import io
import math
import re

import pytest
import torch
from documents import ROOT, TEXT

from docs import learn, learn_pictures
from grpo.loss import group_advantages, policy_loss, token_weights

PAGE = TEXT["docs/learn.md"]
NUMBER = r"\d+\.\d+|\d+(?= GB)"
RESULTS = ("demo.md", "curves.md")


@pytest.fixture(scope="module")
def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        learn.main()
    return out.getvalue()


def row(printed, name):
    """Returns the numbers of a row of the followed token's table."""
    line = next(line for line in printed.splitlines() if line.startswith(name))
    return [float(word) for word in line.removeprefix(name).split()]


# --- The page and the script --------------------------------------------------------------
def test_every_block_of_the_page_is_printed(printed):
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == printed.count("--- ")
    for block in blocks:
        assert block in printed, block


def test_every_number_in_the_text_is_printed_or_has_its_table(printed):
    """Beside what the script prints: what is computed here, results of runs, and the constants that
    the script shares with the trainer. Sections of papers and arXiv's numbers are no results."""
    prose = re.sub(
        r"```.*?```|\]\([^)]*\)|sec\. [\d.]+\d|\b\d{4}\.\d{5}\b", "", PAGE, flags=re.DOTALL
    )
    tables = "".join((ROOT / "benchmarks/results" / name).read_text() for name in RESULTS)
    known = set(re.findall(NUMBER, " ".join([printed, tables, *arguments()])))
    known |= {str(learn.CLIP_LOW), str(learn.KL_BETA)}
    found = re.findall(rf"(?<![\w.])(?:{NUMBER})", prose.replace("Qwen2.5", ""))
    assert len(found) > 25
    assert set(found) <= known, set(found) - known


def test_what_is_said_to_be_shipped_is_what_the_trainer_has():
    body = ast.parse((ROOT / "grpo_ref_split.py").read_text()).body
    constants = [node for node in body if isinstance(node, ast.Assign)]
    trainer = {node.targets[0].id: node.value for node in constants}
    shipped = re.findall(r"^\| `([A-Z_]+)` \| ([\d.e-]+) as shipped", PAGE, re.MULTILINE)
    assert len(shipped) == 4
    for name, value in [*shipped, *((n, getattr(learn, n)) for n in ("CLIP_LOW", "CLIP_HIGH"))]:
        assert float(value) == trainer[name].value, name


def test_the_page_does_by_hand_what_autograd_does(printed):
    """The slope of w (min(r A, clip(r) A) - beta k3), with the signs that the page gives."""
    advantage, weight = 1.4997, 0.0357
    assert f"A = {advantage}, w = {weight}" in printed
    logps, refs = row(printed, "logp"), row(printed, "ref_logp")
    ratios = row(printed, "r = exp(logp - old_logp)")
    for logp, ref, ratio, slope in zip(
        logps, refs, ratios, row(printed, "d loss / d logp"), strict=False
    ):
        gain = ratio * advantage if ratio < 1 + learn.CLIP_HIGH else 0.0
        by_hand = -weight * (gain - learn.KL_BETA * (1 - math.exp(ref - logp)))
        assert by_hand == pytest.approx(slope, abs=1e-4)
    assert row(printed, "loss, the sum over N tokens")[0] == 0  # and yet the policy moved
    assert row(printed, "probability, exp(logp)")[1] > row(printed, "probability, exp(logp)")[0]


def mean_square(ps, baselines):
    """Returns the mean of (R - b)^2 over questions answered right (R = 1) with these chances."""
    both = zip(ps, baselines, strict=True)
    return sum(p * (1 - b) ** 2 + (1 - p) * b**2 for p, b in both) / len(ps)


def of_eight(right):
    """Returns the advantages (8,) of a group with so many right ones, without and with the std."""
    rewards = torch.tensor([1.0] * right + [0.0] * (8 - right))
    return [group_advantages(rewards, scale_by_std=scaled) for scaled in (False, True)]


def arguments():
    """Yields what the page says of one mean over all prompts, and of the std."""
    ps = (0.9, 0.1)
    common = sum(ps) / 2
    one, own = mean_square(ps, [common] * 2), mean_square(ps, ps)
    yield f"The common mean is {common:.1f}, and (R − b)² is {one:.2f} on average;"
    yield f"with each question's own mean it is {own:.2f}"
    (plain, scaled), (half, half_scaled) = ([a[0] for a in of_eight(right)] for right in (1, 4))
    yield f"If one of 8 is right, it gets {plain:.3f} without the std and {scaled:.2f} with it;"
    yield f"if four are, each gets {half:.1f} and {half_scaled:.2f}."


def test_the_arguments_for_the_baseline_and_about_the_std():
    for said in arguments():
        assert said in " ".join(PAGE.split()), said
    plain, scaled = (
        [a.square().sum().item() for a in pair] for pair in zip(*map(of_eight, (1, 4)))
    )
    assert plain[0] < plain[1] / 2  # the question that is nearly always wrong counts less,
    assert scaled == pytest.approx([7, 7], abs=0.01)  # with the std as much


def test_the_first_loss_of_a_later_rollout_is_the_kl_alone():
    """And at the run's first update, where policy and reference are one, the KL does not pull."""
    lengths = torch.tensor([7, 2, 2, 6])
    A = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), scale_by_std=True)
    counts = {"sequences": 4, "tokens": 17, "max_completion_tokens": 8}
    clips = {"clip_low": learn.CLIP_LOW, "clip_high": learn.CLIP_HIGH}
    logps = torch.linspace(-2, -0.1, 17, requires_grad=True)
    for loss_type, cancels in (("grpo", True), ("dapo", False)):
        w = token_weights(lengths, loss_type=loss_type, **counts)
        by_token = [values.repeat_interleave(lengths) for values in (A, w)]
        for ref_logps in (logps.detach(), logps.detach() - 0.5):
            given = logps, None, ref_logps, *by_token
            loss, stats = policy_loss(*given, **clips, kl_beta=learn.KL_BETA)
            kl = learn.KL_BETA * (by_token[1] * stats["kl"]).sum()
            assert (abs(loss - kl) < 1e-6) == cancels
            (slope,) = torch.autograd.grad(loss, logps)
            first = torch.allclose(slope, -by_token[0] * by_token[1])
            assert first == bool((ref_logps == logps).all())


def sentences(printed):
    """Yields what the page says in its prose of the numbers in its blocks."""

    def found(pattern):
        return re.search(pattern, printed, re.MULTILINE).groups()

    def of(name):
        return [f"{x:.4f}" for x in row(printed, name)]

    length, A, w, push = found(r"^7\+5=12  .* (\d+) +1 +\+(\S+) +(\S+) +(\S+)$")
    down, wrong_push = found(r"^7\+5=2  .* \d+ +0 +-(\S+) +\S+ +(\S+)$")
    mean, total = found(r"^mean (\S+), .* N = (\d+)")
    yield f"The mean, {mean}, is the baseline. The right one is {A} standard deviations above it;"
    yield f"each wrong one {down} below."
    yield f"For the first completion 1 / (4 × {length}) = {w}."
    yield f"begins a right completion and a wrong one: {push} and {wrong_push}."

    p, r, slope = map(of, ("probability, exp(logp)", "r = exp(logp - old_logp)", "d loss / d logp"))
    k3, norm = map(of, ("k3, of d = ref_logp - logp", "norm of the gradient"))
    clipped = {4.0: "Four"}[row(printed, "tokens clipped, of N")[2]]
    yield f"d loss / d logp is -w A = -{w} × {A} = {slope[0]}."
    yield f"The token's probability has gone from {p[0]} to {p[1]}: r = {r[1]}."
    yield f"k3 = {k3[1]} already pulls back"
    yield f"Now r = {r[2]}, beyond 1 + `CLIP_HIGH`."
    yield f"Where A is positive the min takes clip(r) A = {of('clip(r) A')[2]}, a constant"
    yield f"What is left, {slope[2]}, is the KL alone"
    yield f"{clipped} of the N = {total} tokens are clipped, and the gradient's norm falls from "
    yield f"the gradient's norm falls from {norm[1]} to {norm[2]}."
    yield f"After update 3 the probability has risen nevertheless, to {p[3]}."
    yield f"the old policy, which draws our token with probability {p[0]}."
    yield f"The policy of that moment would draw it with {p[1]}."
    yield f"Weigh each of the old samples by r = {r[1]}, and {p[0]} × {r[1]} = {p[1]}:"

    before, after = found(r"^right, in sum +(\S+) +(\S+)")
    (rare,), (far,) = found(r"^drawn .*log-prob +(\S+)"), found(r"^k3 at d = .* 0 and (\S+)")
    (mixed,) = found(r"^0\.01 +\S+ +(\S+)")
    yield f"right with probability {before} and is now with {after}."
    yield f"At {rare} this spelling is hardly ever drawn"
    yield f"At d = 5 k3 is {far}: in a step of 1 700 tokens, as the demo's are, one such token "
    yield f"one such token adds {float(far) / 1700:.2f} to `kl`."
    yield f"At 0.01 only {mixed} of the groups teach."


def test_the_prose_repeats_the_blocks(printed):
    page = " ".join(PAGE.replace("−", "-").split())
    assert not [sentence for sentence in sentences(printed) if sentence not in page]


def test_the_demo_s_numbers_are_those_of_its_picture():
    results = (ROOT / "benchmarks/results/demo.md").read_text()
    picture = results.split("the README's picture")[1].split("\n## ")[0]
    before, after = re.search(r"median\*\* \| (\S+) \| \*\*(\S+)\*\*", picture).groups()
    start, control = re.search(r"shuffled \| (\S+) \| (\S+)", picture).groups()
    page = " ".join(PAGE.split())
    assert f"The median of greedy accuracy goes from {before} to {after}." in page
    assert f"it falls to {control} (at other commits to " in page
    elsewhere = re.search(r"other commits to ([^:]*): below its start each time", page)[1]
    assert max(map(float, re.findall(r"0\.\d+", elsewhere))) < float(start)


def test_the_page_s_formula_is_the_loss_s(printed):
    """Read as Python, it has the followed token's part of the loss, and the slope of that."""
    line = re.search(r"^    − w · \((.*)\),   k3 = (.*)$", PAGE, re.MULTILINE)
    objective, k3 = (part.replace("−", "-").replace("·", "*") for part in line.groups())
    objective = re.sub(r"(r|\)) A", r"\1 * A", objective)
    names = {"A": 1.4997, "min": min, "exp": math.exp, "clip": lambda x, a, b: min(max(x, a), b)}
    names |= {name: getattr(learn, name) for name in ("CLIP_LOW", "CLIP_HIGH", "KL_BETA")}
    start = row(printed, "old_logp")[0]  # ref_logp, too

    def loss(logp):
        at = names | {"r": math.exp(logp - start), "d": start - logp}
        return -0.0357 * eval(objective, at | {"k3": eval(k3, at)})

    parts, slopes = row(printed, "its part of the loss"), row(printed, "d loss / d logp")
    for logp, part, slope in zip(row(printed, "logp"), parts, slopes, strict=False):
        assert loss(logp) == pytest.approx(part, abs=1e-4)
        by_difference = (loss(logp + 1e-4) - loss(logp - 1e-4)) / 2e-4
        assert by_difference == pytest.approx(slope, abs=1e-4)


def test_the_std_turns_the_gradient_unless_rewards_have_two_values():
    """Over all 81 groups of 4, of a policy (1/2, 1/4, 1/4) over three answers."""
    p, groups = torch.tensor([1 / 2, 1 / 4, 1 / 4]), torch.cartesian_prod(*[torch.arange(3)] * 4)
    scores = (torch.eye(3) - p)[groups]
    chances = p[groups].prod(1)
    for rewards, turned in (([0.1, 0.0, 1.0], True), ([1.0, 0.0, 0.0], False)):
        means = []
        for scaled in (False, True):
            given = torch.tensor(rewards)[groups]
            A = torch.stack([group_advantages(g, scale_by_std=scaled) for g in given])
            means.append(chances @ (A[..., None] * scores).mean(1))
        assert (torch.cosine_similarity(*means, dim=0) < 0.95) == turned


def test_what_a_first_token_lost_went_to_its_rivals():
    """`12` was not sampled and rose, but its first token got less than half of what `2` lost."""
    model, tokenizer, prompt = learn.start()
    completions = learn.sample(model, tokenizer, prompt)

    def firsts():
        with torch.no_grad():
            probs = model(torch.tensor([prompt])).logits[0, -1, : len(tokenizer)].softmax(-1)
        return [probs[tokenizer(text)["input_ids"][0]].item() for text in "217"]

    before = firsts()
    A = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), scale_by_std=True)
    lengths = torch.tensor([len(c.ids) for c in completions])
    counts = {"sequences": 4, "tokens": 17, "max_completion_tokens": 8}
    w = token_weights(lengths, loss_type="grpo", **counts)
    learn.train(model, tokenizer, prompt, completions, A, w)
    two, one, seven = (after - b for after, b in zip(firsts(), before, strict=True))
    assert one > 0 and seven > one and one < -two / 2 and abs(two + one + seven) < 1e-3


# --- Pictures -----------------------------------------------------------------------------
def test_the_clip_is_flat_on_one_side_of_each_sign():
    ratios = torch.tensor([0.5, 0.9, 1.1, 1.5])
    for advantage, values, flat in (
        (1.0, [0.5, 0.9, 1.1, 1.2], 3),
        (-1.0, [-0.8, -0.9, -1.1, -1.5], 0),
    ):
        got, slopes = learn_pictures.objective(ratios, advantage)
        torch.testing.assert_close(got, torch.tensor(values))
        assert (slopes == 0).nonzero().flatten().tolist() == [flat]


def test_three_estimates_of_the_kl():
    """For a policy (1/2, 1/2) and a reference (1/4, 3/4): KL = ln(4 / 3) / 2."""
    d = (torch.tensor([0.25, 0.75]) / 0.5).log()
    k1, k2, k3 = (values.mean().item() for values in learn_pictures.estimates(d).values())
    assert k1 == pytest.approx(math.log(4 / 3) / 2) == pytest.approx(k3)
    assert k2 != pytest.approx(k1, rel=0.05)


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_pictures, "FOLDER", tmp_path)
    learn_pictures.main()
    for name in learn_pictures.DRAWINGS:
        assert (tmp_path / name).stat().st_size > 10_000 and f"]({name})" in PAGE
        assert (ROOT / "docs" / name).exists()
