"""求导 (qiudao, "to differentiate"): ten lessons on what autograd sees when GRPO trains.

    python test_qiudao.py                     # read the story; LANG=zh_CN.UTF-8: in Chinese
    python -m pytest test_qiudao.py           # check it

A line of numbers reads `what: by hand = value`. The value is what torch and grpo/loss.py computed,
and it has been compared with the derivation by hand. Most lessons share one policy, which draws one
of three tokens with probabilities p = (1/2, 1/4, 1/4), for rewards R = (1, 2, 0). [o = j] is 1 if o
is j, otherwise 0; d is the derivative by the logits. Terms: docs/learn.md.
---
求导：GRPO 训练时 autograd 究竟看到了什么，共十课。

数字行的格式是“名称: 手算 = 数值”：等号左边是手推的式子，右边是 torch 和 grpo/loss.py 算出的结果，
两边已核对相等。多数课用同一个 policy：从三个 token 中采样一个，概率 p = (1/2, 1/4, 1/4)，reward
R = (1, 2, 0)。术语见 docs/learn.zh.md（reward 即奖励，policy 即策略，advantage 即优势，
baseline 即基线，checker 即判分程序）。[o = j]：o 等于 j 时为 1，否则为 0；d 是对 logits 求导。
"""

import inspect
import math
import os
import sys

import torch

from grpo import chunked
from grpo.loss import group_advantages, linear_logps, policy_loss, token_weights

R = torch.tensor([1.0, 2.0, 0.0])
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}  # kl_beta 0: no reference model


def check(name, got, by_hand, within=1e-6):
    """Asserts that the tensor `got` equals the expression `by_hand`; prints both."""
    want = torch.tensor(eval(by_hand, {"log": math.log, "exp": math.exp}), dtype=torch.float32)
    assert got.shape == want.shape and (got - want).abs().max() < within, f"{name}: {got}, {want}"
    sign = "=" if within < 1e-3 else "≈"
    print(f"  {name}: {by_hand} {sign} {text_of(got.tolist())}")


def text_of(value):
    """Example: [0.25, 1.0] -> "[0.25, 1]"; four digits after the point."""
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    return f"{round(value, 4) + 0.0:.4f}".rstrip("0").rstrip(".")


def policy():
    """Returns the logits (3,) of the policy and its log-probs (3,)."""
    logits = torch.tensor([math.log(2), 0.0, 0.0], requires_grad=True)
    return logits, logits.log_softmax(0)


def gradient(value, leaf):
    # materialize_grads: a tensor without a gradient gets zeros, not an error
    return torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)[0]


def loss_of(logps, lengths, advantages, weights):
    """Returns policy_loss of completions that repeat a token of log-prob `logps`; all are (B,)."""
    columns = [column.repeat_interleave(lengths) for column in (logps, advantages, weights)]
    return policy_loss(columns[0], None, None, *columns[1:], **CLIPS)[0]


def test_1_the_policy_gradient():
    """1. A reward that can't be differentiated still gives a gradient.
    R is what a checker gives. But its mean E[R] = sum p_o R_o is smooth in the logits, and from
    d p_o / d logit_j = p_o ([o = j] - p_j) its gradient is p_j (R_j - E[R]). With 150 000 ids and
    500 positions nobody can write out that sum. d p = p d log p makes it a mean over samples,
    E[R_o d log p_o], where d log p_o / d logit_j = [o = j] - p_j: draw, grade, multiply.
    Note token 0: each time it is drawn it is pushed up, and yet its gradient is 0.
    ---
    1. reward 不可导，照样能得到梯度。
    R 由 checker 给出，但期望 E[R] = sum p_o R_o 对 logits 是光滑的：由
    d p_o / d logit_j = p_o ([o = j] - p_j) 得梯度 p_j (R_j - E[R])。词表有 150 000 个 id、序列有
    500 个位置时，这个和谁也算不完。由 d p = p d log p，它化成期望 E[R_o d log p_o]，可用样本均值估
    计，其中 d log p_o / d logit_j = [o = j] - p_j：采样、打分、相乘。
    注意 token 0：每次采到都被往上推，可它的梯度（期望）却是 0。"""
    logits, logp = policy()
    p = logp.exp()
    check("E[R]", p @ R, "1/2 * 1 + 1/4 * 2 + 1/4 * 0")
    check("d E[R]", gradient(p @ R, logits), "[1/2 * (1 - 1), 1/4 * (2 - 1), 1/4 * (0 - 1)]")
    pushes = torch.stack([gradient(R[o] * logp[o], logits) for o in range(3)])
    check("R d log p, token 0", pushes[0], "[1 * (1 - 1/2), 1 * (0 - 1/4), 1 * (0 - 1/4)]")
    check("R d log p, token 1", pushes[1], "[2 * (0 - 1/2), 2 * (1 - 1/4), 2 * (0 - 1/4)]")
    check("R d log p, token 2", pushes[2], "[0 * -1/2, 0 * -1/4, 0 * 3/4]")
    mean = "[1/2 * 1/2 - 1/4 * 1, -1/2 * 1/4 + 1/4 * 3/2, -1/2 * 1/4 - 1/4 * 1/2]"
    check("their mean", p @ pushes, mean)
    drawn = torch.multinomial(p, 10_000, True, generator=torch.Generator().manual_seed(0))
    check("mean of 10 000 samples", pushes[drawn].mean(0), "[0, 1/4, -1/4]", within=0.03)


def test_2_a_one_that_has_a_gradient():
    """2. exp(logp - logp.detach()) is always 1, and yet its gradient is that of logp.
    `detach` keeps a value and cuts the path, so autograd sees a constant: x * x has the slope 2x,
    x * x.detach() only x. Likewise the gradient of exp(logp - c) is exp(logp - c) = 1 times that of
    logp; times an advantage A this is lesson 1. So a rollout's first update needs no second forward
    pass: without old_logps, policy_loss detaches logp itself. If you forget the `detach`,
    logp - logp is 0 and the ratio is 1, as it should be. Only grad_norm shows the mistake: it is 0.
    ---
    2. exp(logp - logp.detach()) 恒等于 1，梯度却是 logp 的梯度。
    `detach` 保留数值、切断反向传播：autograd 只看到常数。所以 x * x 的斜率是 2x，而 x * x.detach()
    只有 x。同理，exp(logp - c) 的梯度是 exp(logp - c) = 1 乘以 logp 的梯度；再乘以 advantage A，就
    是第 1 课。因此每个 rollout 的首次更新不必多做一次 forward：没有 old_logps 时，policy_loss 自己
    detach logp。忘了 `detach`，logp - logp 是 0：ratio 是 1，没错；只有 grad_norm 为 0 露馅。"""
    x = torch.tensor(3.0, requires_grad=True)
    check("d(x * x)/dx", gradient(x * x, x), "2 * 3")
    check("d(x * x.detach())/dx", gradient(x * x.detach(), x), "1 * 3")
    logits, logp = policy()
    for name, ratio, slope in [
        ("ratio", (logp[0] - logp[0].detach()).exp(), "[1 - 1/2, 0 - 1/4, 0 - 1/4]"),
        ("ratio without detach", (logp[0] - logp[0]).exp(), "[1 - 1, 0 - 0, 0 - 0]"),
    ]:
        check(name, ratio, "exp(0)")
        check(f"d {name}", gradient(ratio, logits), slope)
    loss, _ = policy_loss(logp[0], None, None, torch.tensor(2.0), torch.tensor(1.0), **CLIPS)
    check("-d policy_loss, A = 2", gradient(-loss, logits), "[2 * 1/2, 2 * -1/4, 2 * -1/4]")


def test_3_the_loss_is_zero_and_the_model_learns():
    """3. The first loss is 0 and the model learns; where it is not 0, it means as little.
    At the first update r = 1, so without the KL the loss is -sum w A. With LOSS_TYPE "grpo" each
    completion has sum w = 1/G and advantages sum to 0, so the loss is 0, be the model good or bad.
    In the gradient, -sum w A d logp, each A has another factor. The group below has each token as
    often as p says: it is minus the gradient of lesson 1, and an SGD step of rate 1 raises E[R].
    With "dapo" (w = 1/N) and unequal lengths, or if MASK_TRUNCATED drops one, the A do not cancel.
    ---
    3. 首次 loss 是 0，模型却在学；loss 不是 0 时，同样说明不了什么。
    首次更新时 r = 1，不计 KL，loss 就是 -sum w A。LOSS_TYPE 为 "grpo" 时，每条回答的 sum w 都是
    1/G，而组内 advantage 之和为 0：不论模型好坏，loss 都是 0。梯度 -sum w A d logp 里，每个 A 乘的
    d logp 各不相同。下面这组里各 token 的次数恰好符合 p：梯度是第 1 课梯度的相反数，以学习率 1 走一
    步 SGD，E[R] 上升。用 "dapo"（w = 1/N）且长度不等，或 MASK_TRUNCATED 去掉一条，A 就不再抵消。"""
    logits, logp = policy()
    group, ones = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 1, 1])
    A = group_advantages(R[group], scale_by_std=False)
    check("A", A, "[1 - 1, 1 - 1, 2 - 1, 0 - 1]")
    counts = {"sequences": 4, "tokens": 6, "max_completion_tokens": 8}
    weights = token_weights(ones, loss_type="grpo", **counts)
    loss = loss_of(logp[group], ones, A, weights)
    check("loss", loss, "-(0/4 + 0/4 + 1/4 - 1/4)")
    slope = gradient(loss, logits)
    check("d loss", slope, "[1/4 * 1/2 - 1/4 * 1/2, -1/4 * 3/4 - 1/4 * 1/4, 1/4 * 1/4 + 1/4 * 3/4]")
    after = (logits - slope).softmax(0) @ R
    check("E[R] afterwards", after, "(2 + 2 * exp(1/4)) / (2 + exp(1/4) + exp(-1/4))")
    lengths = torch.tensor([1, 1, 3, 1])
    dapo = token_weights(lengths, loss_type="dapo", **counts)
    check('loss, "dapo", T = 1 1 3 1', loss_of(logp[group], lengths, A, dapo), "-(3 * 1 - 1)/6")


def test_4_the_baseline():
    """4. A baseline keeps the direction, and a good one saves samples.
    E[b d log p_o] = b sum d p_o = b d 1 = 0, so subtracting b leaves the mean gradient as it was.
    But the noise, variance / |mean|^2, which decides how many samples we need, changes: b = E[R]
    cuts it to a third. (If all earn 9 more, it is 125.6 without b.) A group's mean contains the
    completion's own R, which takes back 1/G of each push; the noise is RLOO's (mean of the others).
    Below are all 81 groups of G = 4, by their probability. By hand: token o pushes by (R - b) s,
    s = d log p_o; p |s|^2 is 3/16 for token 0, 7/32 for the others; |E[R s]|^2 = 1/8; the noise is
    (E[(R - b)^2 |s|^2] / (1/8) - 1) / G. (RLOO: a sample covariance; Var R = 1/2, E|s|^2 = 5/8.)
    ---
    4. baseline 不改变方向，取得好就省样本。
    E[b d log p_o] = b sum d p_o = b d 1 = 0：减去 b，梯度的期望不变。变的是噪声（方差 / |期望
    |^2），它决定要多少样本：b = E[R] 使它降到三分之一；若每条回答都多得 9 分，没有 b 时它是 125.6，
    有 b 时不变。组内均值含有样本自己的 R，推力被抵掉 1/G，噪声则与 RLOO（用其余样本的均值）相同。
    下面列举 G = 4 的全部 81 种组，按概率加权。手算：token o 的推力是 (R - b) s，s = d log p_o；
    p |s|^2 在 token 0 为 3/16，另两个各为 7/32；|E[R s]|^2 = 1/8；噪声是
    (E[(R - b)^2 |s|^2] / (1/8) - 1) / G。（RLOO 的取自样本协方差：Var R = 1/2，E|s|^2 = 5/8。）"""
    logits, logp = policy()
    p, groups = logp.detach().exp(), torch.cartesian_prod(*[torch.arange(3)] * 4)  # (81, G)
    scores = torch.stack([gradient(logp[o], logits) for o in range(3)])[groups]  # (81, G, 3)
    own = torch.stack([group_advantages(r, scale_by_std=False) for r in R[groups]])
    rloo = "((7/32 + 7/32) / 4 - 2/12 * 1/8 + 1/2 * 5/8 / 12) / (1/8)"
    for name, A, factor, noise in [
        ("no b", R[groups], "1", "((3/16 + 7/32 * 4) / (1/8) - 1) / 4"),
        ("no b, R + 9", R[groups] + 9, "1", "((3/16 * 100 + 7/32 * (121 + 81)) / (1/8) - 1) / 4"),
        ("b = E[R]", R[groups] - 1, "1", "((7/32 + 7/32) / (1/8) - 1) / 4"),
        ("mean of the others", own * 4 / 3, "1", rloo),
        ("group's mean", own, "3/4", rloo),
    ]:
        estimates, chance = (A[..., None] * scores).mean(1), p[groups].prod(1)  # (81, 3), (81,)
        mean = chance @ estimates
        check(f"{name}, E", mean, f"[0, {factor} * 1/4, {factor} * -1/4]", within=5e-6)
        got = chance @ (estimates - mean).square().sum(1) / mean.square().sum()
        check("  noise", got, noise, within=1e-4)


def test_5_clipping_stops_what_has_gone_far_enough():
    """5. Clipping stops a token that has moved far enough in the direction of A, and no other.
    The objective is min(r A, clip(r, 0.8, 1.28) A), with DAPO's CLIP_HIGH. Where clip(r) A is
    smaller it is a constant, of gradient 0: above 1 + CLIP_HIGH if A > 0, below 1 - CLIP_LOW if
    A < 0. At the other two ends the slope by logp stays r A, as d r = r d logp: smaller for a good
    token that became rarer, larger, without bound, for a bad one that became likelier.
    ---
    5. clip 只对沿 A 的方向已经走得够远的 token 停止推动，别的照推。
    目标是 min(r A, clip(r, 0.8, 1.28) A)，CLIP_HIGH 取自 DAPO。clip(r) A 较小时它是常数，梯度为 0：
    A > 0 时在 1 + CLIP_HIGH 以上，A < 0 时在 1 - CLIP_LOW 以下。另外两头，因为 d r = r d logp，对
    logp 的斜率仍是 r A：好 token 概率变小了，斜率也小；坏 token 概率变大了，斜率也大，没有上界。"""
    old_logps = torch.tensor([-2.0])
    for advantage, ratio, by_hand in [
        (1.0, 0.5, "[min(0.5, 0.8), 0.5]"),
        (1.0, 1.5, "[min(1.5, 1.28), 0]"),  # likelier by half: enough
        (-1.0, 0.5, "[min(-0.5, -0.8), 0]"),  # rarer by half: enough
        (-1.0, 1.5, "[min(-1.5, -1.28), -1.5]"),  # the wrong way: pushed back harder
    ]:
        logps = (old_logps + math.log(ratio)).requires_grad_()
        A = torch.tensor([advantage])
        loss, _ = policy_loss(logps, old_logps, None, A, torch.ones(1), **CLIPS)
        value_and_slope = torch.stack([-loss, gradient(-loss, logps)[0]])
        check(f"A {advantage:+.0f}, r {ratio}, [objective, slope]", value_and_slope, by_hand)


def test_6_three_estimates_of_the_kl():
    """6. k3 has the KL's mean and, near ref, little variance; its gradient is that of another KL.
    The reference is (1/4, 1/2, 1/4): d = ref_logp - logp = (-log 2, log 2, 0). k1 = -d has the mean
    KL by definition, k2 = d^2 / 2 nearly; k3 = exp(d) - d - 1 adds exp(d) - 1 to k1, with the mean
    sum ref - 1 = 0. Their gradients differ, as autograd sees a sample's value, not how p draws it.
    The KL's gradient is E[-d s], s = grad log p (E[s] = 0). Autograd gets from a sample of each:
    - k1: s, of mean 0: no penalty
    - k2, and k3 r (UNBIASED_KL): -d s, the KL's gradient
    - k3: (1 - exp(d)) s, of mean p - ref: the gradient of KL(reference || policy)
    ---
    6. k3 是 KL 的无偏估计，在 reference 附近方差也小；但它的梯度属于另一个 KL。
    reference 为 (1/4, 1/2, 1/4)：d = ref_logp - logp = (-log 2, log 2, 0)。k1 = -d 的均值按定义就是
    KL，k2 = d^2 / 2 略有偏差；k3 = exp(d) - d - 1 比 k1 多 exp(d) - 1，其均值为 sum ref - 1 = 0。梯
    度则不同，因为 autograd 只看到样本的值，看不到 p 怎样采样。KL 的梯度是 E[-d s]，s = grad log p
    （另有 E[s] = 0）。autograd 从每个样本得到的梯度：
    - k1：s，均值为 0：等于没有惩罚
    - k2，以及 k3 r（UNBIASED_KL）：-d s，就是 KL 的梯度
    - k3：(1 - exp(d)) s，均值 p - ref：是 KL(reference || policy) 的梯度"""
    logits, logp = policy()
    p, ref = logp.exp().detach(), torch.tensor([0.25, 0.5, 0.25]).log()
    kl, exact = (logp.exp() * (logp - ref)).sum(), "[3/8 * log(2), -5/16 * log(2), -1/16 * log(2)]"
    check("KL", kl, "1/2 * log(2) - 1/4 * log(2)")
    check("grad KL", gradient(kl, logits), exact)
    settings = CLIPS | {"kl_beta": 1.0}  # with A = 0 and w = p the loss is E[k3]
    k3_loss, stats = policy_loss(logp, None, ref, torch.zeros(3), p, **settings)
    unbiased, _ = policy_loss(logp, None, ref, torch.zeros(3), p, **settings, unbiased_kl=True)
    k1, k2, k3 = logp - ref, (logp - ref) ** 2 / 2, stats["kl"]
    for name, k, mean, square in [
        ("k1", k1, "1/4 * log(2)", "3/4 * log(2)**2"),
        ("k2", k2, "3/8 * log(2)**2", "3/16 * log(2)**4"),
        ("k3", k3, "1/4 * log(2)", "1/2 * (log(2) - 1/2)**2 + 1/4 * (1 - log(2))**2"),
    ]:
        check(f"E {name}", p @ k, mean)
        check("  variance", p @ k**2 - (p @ k) ** 2, f"{square} - ({mean})**2")
    check("E grad k1", gradient(p @ k1, logits), "[1/2 - 1/2, 1/4 - 1/4, 1/4 - 1/4]")
    check("E grad k2", gradient(p @ k2, logits), exact)
    check("E grad k3", gradient(k3_loss, logits), "[1/2 - 1/4, 1/4 - 1/2, 1/4 - 1/4]")
    back = gradient(ref.exp() @ (ref - logp), logits)
    check("grad KL(reference || policy)", back, "[1/2 - 1/4, 1/4 - 1/2, 1/4 - 1/4]")
    check("E grad(k3 r)", gradient(unbiased, logits), exact)


def test_7_length_bias():
    """7. LOSS_TYPE, the mean's denominator, decides whose mistakes are cheap.
    Two right and two wrong answers have 2 and 8 tokens: A = 1/2 and -1/2. "grpo" gives each answer
    one vote, which its tokens share: w = 1/(G T). So a token of a long wrong answer is pushed down
    a quarter as hard as one of a short wrong answer (and up, if right). Then E[(R - b)/T] climbs,
    not E[R]: be brief when right, long when wrong, if it knows which. "dapo": w = 1/N for all, so
    if one answer grows to 28, each push is halved. "dr_grpo": 1/(G MAX_COMPLETION_TOKENS), here 32.
    ---
    7. LOSS_TYPE 就是均值的分母，它决定谁犯错的代价小。
    两对两错，长度各为 2 和 8：A = 1/2 与 -1/2。"grpo" 给每条回答一票，由它的各个 token 平分：
    w = 1/(G T)。长的错误回答，每个 token 受的惩罚只有短的四分之一；长的正确回答，得到的鼓励也只有四
    分之一。上升的不是 E[R]，而是 E[(R - b)/T]：对了少说，错了多说，只要它分得出对错。"dapo" 取
    w = 1/N，一视同仁；一条变成 28 个 token，所有推力都减半。"dr_grpo" 取
    w = 1/(G MAX_COMPLETION_TOKENS)，这里上限 32，与长度无关。"""
    A = group_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0]), scale_by_std=False)
    for loss_type, last, short, long in [
        ("grpo", 8, "1/2 / (4*2)", "1/2 / (4*8)"),
        ("dapo", 8, "1/2 / 20", "1/2 / 20"),
        ("dapo", 28, "1/2 / 40", "1/2 / 40"),
        ("dr_grpo", 28, "1/2 / (4*32)", "1/2 / (4*32)"),
    ]:
        lengths = torch.tensor([2, 8, 2, last])
        counts = {"sequences": 4, "tokens": int(lengths.sum()), "max_completion_tokens": 32}
        push = token_weights(lengths, loss_type=loss_type, **counts) * A
        by_hand = f"[{short}, {long}, -{short}, -{long}]"
        check(f'"{loss_type}", T = 2 8 2 {last}, w A', push, by_hand)


def test_8_accumulation():
    """8. A mean of micro-batch means is no mean: count the whole step first, then only add.
    Completions of 1, 1 and 4 tokens have A = 1, 0, -1; "dapo" wants w = 1/6. If the micro-batches
    {1 1} and {4} are divided by their own counts and averaged, w is 1/2/2 and 1/4/2; with {1 4} and
    {1} it is 1/5/2 and 1/1/2, so the gradient depends on the cut. Here token_weights gets the whole
    step's counts, and the parts add up however it is cut. -d loss by hand: sum w A ([o = j] - p_j).
    ---
    8. micro-batch 均值的均值不是均值：先数清整个 step，之后只做加法。
    三条回答有 1、1、4 个 token，A = 1、0、-1；"dapo" 要求 w = 1/6。切成 {1 1} 和 {4}，各求均值再平
    均，w 成了 1/2/2 和 1/4/2；切成 {1 4} 和 {1}，又成了 1/5/2 和 1/1/2：梯度取决于谁和谁分在一起。
    这里 token_weights 得到整个 step 的计数，各部分相加，怎么切都一样。手算：
    -d loss = sum w A ([o = j] - p_j)。"""
    logits, logp = policy()
    lengths, ids, A = torch.tensor([1, 1, 4]), torch.tensor([1, 0, 2]), torch.tensor([1, 0, -1])

    def accumulated(cut, tokens=None):  # None: each micro-batch counts alone
        total = torch.zeros(3)
        for part in cut:
            own = int(lengths[part].sum())
            counts = {"sequences": 3, "tokens": tokens or own, "max_completion_tokens": 8}
            weights = token_weights(lengths[part], loss_type="dapo", **counts)
            total -= gradient(loss_of(logp[ids[part]], lengths[part], A[part], weights), logits)
        return total

    one, other = [[0, 1], [2]], [[0, 2], [1]]
    right = "[3/6 * 1/2, 1/6 + 3/6 * 1/4, -4/6 + 3/6 * 1/4]"
    check("{1 1} {4}, right", accumulated(one, tokens=6), right)
    check("{1 4} {1}, right", accumulated(other, tokens=6), right)
    first = "[1/4 * 1/2, 1/2/2 + 1/4 * 1/4, -4 * 1/4/2 + 1/4 * 1/4]"
    check("{1 1} {4}, mean of means", accumulated(one) / 2, first)
    second = "[3/10 * 1/2, 1/5/2 + 3/10 * 1/4, -4 * 1/5/2 + 3/10 * 1/4]"
    check("{1 4} {1}, mean of means", accumulated(other) / 2, second)


def test_9_train_what_was_drawn():
    """9. Train what was drawn, as it was drawn: (a) no token left out, (b) the same temperature.
    A baseline is free because E[d log p] = 0. This needs every sampled token, and log-probs of the
    distribution that was sampled. If either is missing, the gradient depends on b.
    (a) A policy writes a word w or EOS, 1/2 each, at most two tokens: "EOS", "w EOS" and "w w",
    which is truncated; R = 1, 1, 0. The slope of logp by EOS's logit is 1/2 for EOS, -1/2 for w.
    If EOS is masked, as by `ids != pad` where pad is EOS, nothing rewards stopping: with b = 0 it
    is unlearned. With b = 3/4, the mean of R, it is still learned, as "w w" is pushed down.
    MASK_TRUNCATED = True breaks this too, on purpose: it drops the unfinished "w w", and with
    b = 3/4 a quarter of the push is left.
    (b) Drawn at tau = 1/2 and trained at tau = 1, equal rewards push by q - p if b = 0: the policy
    gets sharper for no merit. The group's mean (here E[R]) cancels this at the first token only.
    ---
    9. 采到什么就训练什么，怎么采就怎么训练：(a) 一个 token 也不漏，(b) temperature 要一致。
    baseline 无偏，靠的是 E[d log p] = 0：token 一个不少，对数概率取自采样的分布，否则梯度依赖 b。
    (a) 设 policy 以 1/2 的概率写词 w 或 EOS，最多两个 token："EOS"、"w EOS"，以及被截断的 "w w"；
    R = 1、1、0。logp 对 EOS 的 logit 的斜率：EOS 为 1/2，w 为 -1/2。pad 就是 EOS 时，`ids != pad`
    会 mask 掉 EOS，就没有什么直接奖励停止：b = 0 时越学越停不下来；b 取均值 3/4 时仍会学：压低了
    "w w"。MASK_TRUNCATED = True 有意破例，去掉 "w w"：b = 3/4 时推力只剩四分之一。
    (b) 用 tau = 1/2 采样、用 tau = 1 训练，b = 0 时，reward 全都相同也有推力 q - p：分布平白变尖。
    组内均值（这里 b = E[R]）能抵消首个 token 上的这种推力；其后前缀有好有坏，就不能。"""
    eos = torch.zeros(2, requires_grad=True)  # logits of w and EOS
    ids, ends = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0])  # R, by token
    chance = torch.tensor([1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 4])  # of the token's completion
    no_eos, no_ww = chance * (ids == 0), chance * ends
    for name, weights, b, by_hand in [
        ("all, b = 0", chance, 0, "1/2 * 1/2 + 1/4 * (-1/2 + 1/2)"),
        ("all, b = 3/4", chance, 3 / 4, "1/2 * 1/4 * 1/2 + 1/4 * -3/4 * (-1/2 - 1/2)"),
        ("no EOS, b = 0", no_eos, 0, "1/4 * -1/2"),
        ("no EOS, b = 3/4", no_eos, 3 / 4, "1/4 * 1/4 * -1/2 + 1/4 * 3/4"),
        ('no "w w", b = 0', no_ww, 0, "1/2 * 1/2 + 1/4 * (-1/2 + 1/2)"),
        ('no "w w", b = 3/4', no_ww, 3 / 4, "1/2 * 1/4 * 1/2 + 1/4 * 1/4 * (-1/2 + 1/2)"),
    ]:
        loss, _ = policy_loss(eos.log_softmax(0)[ids], None, None, ends - b, weights, **CLIPS)
        check(f"(a) {name}, slope by EOS's logit", gradient(-loss, eos)[1], by_hand)
    logits, logp = policy()
    cold = linear_logps(logits.expand(3, 3), None, torch.arange(3), temperature=0.5)
    q, ones = cold.detach().exp(), torch.ones(3)
    check("(b) q, drawn at tau = 1/2", q, "[2**2 / 6, 1/6, 1/6]")
    for name, logps, A, by_hand in [
        ("R = 1, b = 0, trained at tau = 1/2", cold, ones, "[4/6-4/6, 1/6-1/6, 1/6-1/6]"),
        ("R = 1, b = 0, trained at tau = 1", logp, ones, "[4/6-1/2, 1/6-1/4, 1/6-1/4]"),
        ("b = E[R], trained at tau = 1", logp, R - 1, "[4/6 * 0, 1/6 * 1, 1/6 * -1]"),
    ]:
        loss, _ = policy_loss(logps, None, None, A, q, **CLIPS)
        check(f"(b) {name}", gradient(-loss, logits), by_hand)


def test_10_the_logits_are_computed_twice():
    """10. Logits need not be kept: the backward pass computes them again, to the same gradient.
    The logits z = H W^T have V numbers per token, and autograd keeps their softmax for the backward
    pass. grpo/chunked.py makes z chunk by chunk and keeps two numbers per token: the largest
    logit and the log of the sum of exp(z). The backward pass makes the same z again, and so p. Its
    gradient is right, as the loss sees z through logp alone: autograd brings the slope by logp from
    policy_loss, and for a token y, by lesson 1, dz_j = slope ([y = j] - p_j). So dH = dz W, and
    dW = dz^T H adds up over chunks. With W = the policy's logits and h = 1, dW is lesson 3's.
    ---
    10. logits 不必保留：backward 时再算一遍，梯度不变。
    logits z = H W^T 每个 token 有 V 个数，autograd 要把它们的 softmax 留到 backward。
    grpo/chunked.py 分 chunk 算 z，每个 token 只留两个数：最大的 logit，以及 exp(z) 之和的对数。
    backward 重新算出同一个 z，从而得到 p。梯度没有错，因为 loss 只通过 logp 看到 z：autograd 从
    policy_loss 送来对 logp 的斜率 slope，对 token y，由第 1 课，dz_j = slope ([y = j] - p_j)。于是
    dH = dz W，dW = dz^T H，后者由各 chunk 相加。W 取 policy 的 logits，h = 1：dW 与第 3 课相同。"""
    W = policy()[0].detach()[:, None].requires_grad_()  # (V, 1)
    h, ids, kept = torch.ones(4, 1, requires_grad=True), torch.tensor([0, 0, 1, 2]), {}
    for logps_of, numbers in [(linear_logps, "4 * 3"), (chunked.linear_logps, "4 * 2")]:
        kept.clear()  # what autograd keeps, each tensor once
        keep = torch.autograd.graph.saved_tensors_hooks
        with keep(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
            logps = logps_of(h, W, ids)
        floats = sum(t.numel() for t in kept.values() if t.is_floating_point())
        check(f"{logps_of.__module__} keeps", torch.tensor(floats - len(h) - len(W)), numbers)
        loss = loss_of(logps, torch.ones(4).int(), R[ids] - 1, torch.full((4,), 1 / 4))
        check("  slope", gradient(loss, logps), "[0, 0, -1/4 * 1, -1/4 * -1]")
        check("  dH", gradient(loss, h)[:, 0], "[0, 0, 1/8 * log(2), -1/8 * log(2)]")
        check("  dW", gradient(loss, W)[:, 0], "[1/8 - 1/8, -3/16 - 1/16, 1/16 + 3/16]")


if __name__ == "__main__":
    chinese = os.environ.get("LANG", "").startswith("zh")
    lessons = [value for name, value in vars().items() if name.startswith("test_")]
    for part in [sys.modules[__name__], *lessons]:
        print(inspect.getdoc(part).split("\n---\n")[chinese], end="\n\n")
        if part in lessons:
            part()
            print()
