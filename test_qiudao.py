"""求导 (qiudao, "to differentiate"): what autograd sees when GRPO trains, in eleven lessons.

    python test_qiudao.py                     # read the story; LANG=zh_CN.UTF-8: in Chinese
    python -m pytest test_qiudao.py           # check it

For readers of docs/learn.md who know PyTorch's autograd and want to check the page with a pencil.
Each lesson ends with what it means for a run. A line of numbers reads `what: by hand = value`: the
value that torch and grpo/loss.py computed has been compared with the derivation by hand. Most
lessons share one policy. It draws a token with probabilities p = (1/2, 1/4, 1/4), for the rewards
R = (1, 2, 0). [o = j] is 1 if o is j, else 0; d is the gradient with respect to the logits.
---
求导：GRPO 训练时 autograd 究竟看到了什么，共十一课。

写给读过 docs/learn.zh.md、会用 PyTorch 的 autograd、想拿起纸笔核对一遍的读者。
每课最后一句说明它对训练意味着什么。数字行的格式是“名称: 手算 = 数值”：
等号左边是手推的式子，右边是 torch 和 grpo/loss.py 算出的结果，两边已核对相等。
多数课用同一个策略：从三个 token 中采样一个，概率 p = (1/2, 1/4, 1/4)，奖励 R = (1, 2, 0)。
[o = j]：o 等于 j 时为 1，否则为 0；d 是对 logits 求导。
"""

import inspect
import math
import os

import torch

from grpo.loss import group_advantages, linear_logps, policy_loss, token_weights

R = torch.tensor([1.0, 2.0, 0.0])
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}  # kl_beta 0: no reference model


def check(name, got, by_hand, within=1e-6):
    """Asserts that the tensor `got` equals the expression `by_hand`; prints both."""
    want = torch.tensor(eval(by_hand, {"log": math.log, "exp": math.exp}), dtype=torch.float32)
    assert got.shape == want.shape and (got - want).abs().max() < within, f"{name}: {got}, {want}"
    line, value = f"  {name}: {by_hand}", f"{'=' if within < 1e-3 else '≈'} {text_of(got.tolist())}"
    print(line, value, sep="\n      " if len(line + value) > 99 else " ")


def text_of(value):
    """Example: [0.25, 1.0] -> "[0.25, 1]"; four digits after the point."""
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    return f"{round(value, 4) + 0.0:.4f}".rstrip("0").rstrip(".")


def policy(p=(1 / 2, 1 / 4, 1 / 4)):
    """Returns the logits (3,) of a policy and the log-probs (3,) of its three tokens."""
    logits = torch.tensor(p).log().requires_grad_()
    return logits, linear_logps(logits.expand(3, 3), None, torch.arange(3))


def gradient(value, leaf):  # zeros, not an error, if the value has none
    return torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)[0]


def test_1_the_policy_gradient():
    """1. A reward that can't be differentiated still gives a gradient.
    R is what a checker gives. But its mean E[R] = sum p_o R_o is smooth in the logits, and from
    d p_o / d logit_j = p_o ([o = j] - p_j) its gradient is p_j (R_j - E[R]). With 150 000 ids and
    500 positions nobody can write out that sum. d p = p d log p makes it a mean over samples,
    E[R_o d log p_o], where d log p_o / d logit_j = [o = j] - p_j: draw, grade, multiply.
    Note token 0: each time it is drawn it is pushed up, and yet its gradient is 0.
    In a run: only the mean push is right, so a step needs many completions.
    ---
    1. 奖励不可导，照样能得到梯度。
    R 由判分程序给出，但期望 E[R] = sum p_o R_o 对 logits 是光滑的：
    由 d p_o / d logit_j = p_o ([o = j] - p_j) 得梯度 p_j (R_j - E[R])。
    词表有 150 000 个 id、序列有 500 个位置时，这个和谁也算不完。由 d p = p d log p，
    它化成期望 E[R_o d log p_o]，其中 d log p_o / d logit_j = [o = j] - p_j：采样、打分、相乘。
    注意 token 0：每次采到都被往上推，可它的梯度（期望）却是 0。
    训练时：只有推力的均值是对的，所以每一步都要采样很多条回答。"""
    logits, logp = policy()
    p = logp.exp()
    check("d E[R]", gradient(p @ R, logits), "[1/2 * (1 - 1), 1/4 * (2 - 1), 1/4 * (0 - 1)]")
    pushes = torch.stack([gradient(R[o] * logp[o], logits) for o in range(3)])
    check("R d log p, token 0", pushes[0], "[1 * (1 - 1/2), 1 * (0 - 1/4), 1 * (0 - 1/4)]")
    check("R d log p, token 1", pushes[1], "[2 * (0 - 1/2), 2 * (1 - 1/4), 2 * (0 - 1/4)]")
    check("E[R d log p]", p @ pushes, "[1/4 - 1/4 + 0, -1/8 + 3/8 + 0, -1/8 - 1/8 + 0]")
    drawn = torch.multinomial(p, 10_000, True, generator=torch.Generator().manual_seed(0))
    check("mean of 10 000 samples", pushes[drawn].mean(0), "[0, 1/4, -1/4]", within=0.03)


def test_2_a_one_that_has_a_gradient():
    """2. exp(logp - logp.detach()) is always 1, and yet its gradient is that of logp.
    `detach` keeps a value and cuts the path: x * x has the slope 2x, x * x.detach() only x. So the
    gradient of exp(logp - c) is exp(logp - c) = 1 times that of logp; times an advantage A this is
    lesson 1. Without old_logps, as at a rollout's first update, policy_loss takes logp.detach().
    Without that `detach` the ratio would still be 1, but have no gradient. The factor of IS_CAP,
    exp(old_logp - sampler_logp), is detached, too, or it would get the gradient that r has lost.
    In a run: a forgotten detach shows as a grad_norm of 0, and later in a kl that stays 0.
    ---
    2. exp(logp - logp.detach()) 恒等于 1，梯度却是 logp 的梯度。
    `detach` 保留数值、切断反向传播：x * x 的斜率是 2x，而 x * x.detach() 只有 x。
    同理，exp(logp - c) 的梯度是 exp(logp - c) = 1 乘以 logp 的梯度；再乘以优势 A，就是第 1 课。
    每批 rollout 第一次更新没有 old_logps，policy_loss 用 logp.detach()。少了 detach，概率比仍是 1，
    却没有梯度。IS_CAP 的因子 exp(old_logp - sampler_logp) 也要 detach，否则丢掉的梯度会从它回来。
    训练时：漏写 detach 的话，grad_norm 为 0，之后 kl 也一直是 0。"""
    x = torch.tensor(3.0, requires_grad=True)
    check("d(x * x.detach())/dx", gradient(x * x.detach(), x), "1 * 3")
    (logits, logp), A, w = policy(), torch.tensor(2.0), torch.tensor(1.0)
    one, sampler = logp[0], logp[0].detach()
    for name, ratio, slope in [
        ("ratio", (one - one.detach()).exp(), "[1 - 1/2, 0 - 1/4, 0 - 1/4]"),
        ("ratio without detach", (one - one).exp(), "[1 - 1, 0 - 0, 0 - 0]"),
    ]:
        check(name, ratio, "exp(0)")
        check(f"d {name}", gradient(ratio, logits), slope)
    for is_cap in (0, 2):
        loss = policy_loss(one, None, None, A, w, **CLIPS, sampler_logps=sampler, is_cap=is_cap)[0]
        check(f"-d loss, A = 2, IS_CAP = {is_cap}", gradient(-loss, logits), "[2/2, -2/4, -2/4]")


def test_3_the_loss_is_zero_and_the_model_learns():
    """3. The first loss is 0, and the model learns.
    At the first update r = 1, so without the KL the loss is -sum w A. With LOSS_TYPE "grpo" each
    completion has sum w = 1/G and advantages sum to 0, so the loss is 0, be the model good or bad.
    In the gradient, -sum w A d logp, each A has another factor. The group below has each token as
    often as p says: it is minus the gradient of lesson 1, and an SGD step of rate 1 raises E[R].
    In a run: judge by reward and accuracy; a loss near 0 tells you nothing.
    ---
    3. 第一次的 loss 是 0，模型却在学。
    第一次更新时 r = 1，不计 KL，loss 就是 -sum w A。LOSS_TYPE 为 "grpo" 时每条的 sum w 都是 1/G，
    而组内优势之和为 0：不论模型好坏，loss 都是 0。梯度 -sum w A d logp 里则不抵消。
    下面这组里各 token 的次数恰好符合 p：梯度是第 1 课的相反数，以学习率 1 走一步 SGD，E[R] 上升。
    训练时：看奖励和准确率；loss 接近 0 说明不了什么。"""
    logits, logp = policy()
    group, T = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 1, 1])
    A = group_advantages(R[group], scale_by_std=False)
    w = token_weights(T, loss_type="grpo", sequences=4, tokens=4, max_completion_tokens=8)
    loss, _ = policy_loss(logp[group], None, None, A, w, **CLIPS)
    check("loss", loss, "-(1/4 * (1 - 1) + 1/4 * (1 - 1) + 1/4 * (2 - 1) + 1/4 * (0 - 1))")
    slope = gradient(loss, logits)
    check("d loss", slope, "[1/4 * 1/2 - 1/4 * 1/2, -1/4 * 3/4 - 1/4 * 1/4, 1/4 * 1/4 + 1/4 * 3/4]")
    after = (logits - slope).softmax(0) @ R
    check("E[R] afterwards", after, "(2 + 2 * exp(1/4)) / (2 + exp(1/4) + exp(-1/4))")


def test_4_the_baseline():
    """4. A baseline keeps the direction, and a good one saves samples.
    E[b d log p_o] = b sum d p_o = b d 1 = 0, so subtracting b leaves the mean gradient as it was.
    But the noise, a push's variance / |mean|^2, decides how many samples we need. By hand: token o
    pushes by (R - b) s, s = d log p_o; p |s|^2 is 3/16 for token 0, 7/32 for the others.
    In a group's mean 1/G is the completion's own R; the rest, drawn without it, is a baseline. So
    1/G of the gradient is lost: the last line, a mean over all 81 groups of G = 4.
    In a run: points that all completions of a prompt get change nothing.
    ---
    4. 基线不改变方向，取得好就省样本。
    E[b d log p_o] = b sum d p_o = b d 1 = 0：减去 b，梯度的期望不变。
    变的是噪声，即推力的方差 / |期望|^2，它决定要多少样本。手算：token o 的推力是 (R - b) s，
    s = d log p_o；p |s|^2 在 token 0 为 3/16，另两个各为 7/32。组的均值里有 1/G 是自己的 R，
    其余与它无关，是基线：所以梯度少了 1/G，见末行，即 G = 4 的全部 81 种组的均值。
    训练时：一个 prompt 的各条回答都得的分，不起任何作用。"""
    logits, logp = policy()
    p, scores = logp.detach().exp(), torch.stack([gradient(logp[o], logits) for o in range(3)])
    for name, A, noise in [
        ("no b", R, "(3/16 * 1 + 7/32 * (4 + 0)) / (1/8) - 1"),
        ("no b, R + 9", R + 9, "(3/16 * 100 + 7/32 * (121 + 81)) / (1/8) - 1"),
        ("b = E[R]", R - 1, "(3/16 * 0 + 7/32 * (1 + 1)) / (1/8) - 1"),
    ]:
        pushes, mean = A[:, None] * scores, p @ (A[:, None] * scores)
        check(f"{name}: mean push", mean, "[0, 1/4, -1/4]")
        got = p @ (pushes - mean).square().sum(1) / mean.square().sum()
        check("  its noise", got, noise, within=1e-4)
    groups = torch.cartesian_prod(*[torch.arange(3)] * 4)  # (81, G)
    A = torch.stack([group_advantages(rewards, scale_by_std=False) for rewards in R[groups]])
    mean = p[groups].prod(1) @ (A[..., None] * scores[groups]).mean(1)
    check("b = the group's mean: mean push", mean, "[0, 3/4 * 1/4, 3/4 * -1/4]")


def test_5_dividing_by_the_std():
    """5. Dividing by the std gives very easy and very hard prompts more weight.
    If k of G = 8 answers are right (R = 1), R - mean is 1 - k/8 or -k/8. The variance is
    sum (R - mean)^2 / (G - 1) = k (8 - k) / 56. So the std is 0.35 if one or seven are right, and
    the group's pushes become 2.8 times as large; if four are right, only 1.9 times. In return the
    unit of R no longer matters. (The 1e-4 that is added to the std avoids 0/0 if all are right.)
    In a run: the default, ADVANTAGE_STD = True, favors groups nearly all right or nearly all wrong.
    ---
    5. 除以标准差，极易和极难的 prompt 分量变大。
    G = 8 条里对 k 条（R = 1）时，R - 均值是 1 - k/8 或 -k/8。方差是：
    sum (R - 均值)^2 / (G - 1) = k (8 - k) / 56。所以对一条或七条时标准差为 0.35，
    整组的推力变成 2.8 倍；对四条时只有 1.9 倍。好处是与 R 的单位无关。（加 1e-4 以免 0/0。）
    训练时：默认的 ADVANTAGE_STD = True 偏重几乎全对或几乎全错的组。"""
    for name, k, points, right, wrong, std in [
        ("one of eight", 1, 1, "7/8", "-1/8", "(1/8)**0.5"),
        ("four of eight", 4, 1, "1/2", "-1/2", "(2/7)**0.5"),
        ("seven of eight", 7, 1, "1/8", "-7/8", "(1/8)**0.5"),
        ("eight of eight", 8, 1, "0", "0", "0"),
        ("one of eight, R = 100", 1, 100, "700/8", "-100/8", "100 * (1/8)**0.5"),
    ]:
        rewards = points * (torch.arange(8) < k)
        A, scaled = (group_advantages(rewards, scale_by_std=on)[[0, 7]] for on in (False, True))
        check(f"{name}: A", A, f"[{right}, {wrong}]")
        by_hand = f"[{right} / ({std} + 1e-4), {wrong} / ({std} + 1e-4)]"
        check("  divided by the std", scaled, by_hand)


def test_6_the_second_update():
    """6. The ratio makes samples of an old policy count as if the new policy had drawn them.
    The old policy drew with q = (1/2, 1/4, 1/4), and one update made it p = (9/20, 3/10, 1/4). The
    next update weighs the same samples by r = p / q. As d r = r d log p and q r = p, the mean push,
    sum q r (R - b) d log p, is lesson 1's gradient at p, where E[R] = 1.05, whatever b is. (In a
    long completion r corrects each token, but not those before it.) Without r the mean push is
    sum q (R - b) d log p = q_j (R_j - b) - p_j (1 - b), which depends on b. With b = 1, the old
    E[R], token 0 is not pushed; but its R = 1 is now below the mean.
    In a run: UPDATES_PER_ROLLOUT > 1 and workers rely on r; far from 1 it is noisy.
    ---
    6. 乘上概率比，旧策略的样本就相当于新策略采出来的样本。
    旧策略以 q = (1/2, 1/4, 1/4) 采样；一次更新后成了 p = (9/20, 3/10, 1/4)，E[R] = 1.05。
    下次更新仍用这些样本，各乘以 r = p / q。因为 d r = r d log p，q r = p，
    所以平均推力 sum q r (R - b) d log p 就是第 1 课在 p 处的梯度，b 可任取。
    （回答较长时，r 只修正当前 token 的概率，不修正前文的概率。）没有 r，平均推力则是：
    sum q (R - b) d log p = q_j (R_j - b) - p_j (1 - b)，它依赖 b。
    取旧的 E[R]，即 b = 1，token 0 就不受推力；可它的 R = 1 如今已低于均值。
    训练时：UPDATES_PER_ROLLOUT > 1 或用 worker 时，全靠 r；r 离 1 远了，噪声就大。"""
    (logits, logp), q = policy((9 / 20, 3 / 10, 1 / 4)), torch.tensor([1 / 2, 1 / 4, 1 / 4])
    check("r", (logp - q.log()).exp(), "[9/20 / (1/2), 3/10 / (1/4), 1/4 / (1/4)]")
    exact = "[9/20 * (1 - 1.05), 3/10 * (2 - 1.05), 1/4 * (0 - 1.05)]"
    check("d E[R], new", gradient(logp.exp() @ R, logits), exact)
    for name, old_logps, b, by_hand in [
        ("with r, b = 0", q.log(), 0, exact),
        ("with r, b = 1", q.log(), 1, exact),
        ("without r, b = 0", None, 0, "[1/2 * 1 - 9/20, 1/4 * 2 - 3/10, 1/4 * 0 - 1/4]"),
        ("without r, b = 1", None, 1, "[1/2 * 0, 1/4 * 1, 1/4 * -1]"),
    ]:
        loss, _ = policy_loss(logp, old_logps, None, R - b, q, **CLIPS)
        check(name, gradient(-loss, logits), by_hand)


def test_7_clipping_stops_what_has_gone_far_enough():
    """7. Clipping stops a token that has moved far enough in the direction of A, and no other.
    The objective is min(r A, clip(r, 0.8, 1.28) A), with DAPO's CLIP_HIGH. Where clip(r) A is
    smaller it is a constant, of gradient 0: above 1 + CLIP_HIGH if A > 0, below 1 - CLIP_LOW if
    A < 0. At the other two ends the slope with respect to logp is still r A, as d r = r d logp:
    smaller for a good token that became rarer, larger, without bound, for a bad one, likelier now.
    In a run: by default r is 1 and nothing is clipped; a second update or workers change that.
    ---
    7. 裁剪只让沿 A 的方向已经走得够远的 token 不再受推动，别的 token 照推不误。
    目标是 min(r A, clip(r, 0.8, 1.28) A)，上限取自 DAPO。clip(r) A 较小时它是常数，梯度为 0：
    A > 0 时在 1 + CLIP_HIGH 以上，A < 0 时在 1 - CLIP_LOW 以下。另外两头，因为 d r = r d logp，
    斜率仍是 r A：好 token 概率变小了，斜率也小；坏 token 概率变大了，斜率也大，没有上界。
    训练时：默认 r 总是 1，什么也不裁剪；第二次更新或 worker 才会用到它。"""
    old_logps = torch.tensor([-2.0])
    for advantage, ratio, by_hand in [
        (1.0, 0.5, "[min(0.5, 0.8), 0.5]"),
        (1.0, 1.5, "[min(1.5, 1.28), 0]"),  # likelier by half: enough
        (-1.0, 0.5, "[min(-0.5, -0.8), 0]"),  # rarer by half: enough
        (-1.0, 1.5, "[min(-1.5, -1.28), -1.5]"),  # the wrong way: pushed back harder
    ]:
        logps, A = (old_logps + math.log(ratio)).requires_grad_(), torch.tensor([advantage])
        loss, _ = policy_loss(logps, old_logps, None, A, torch.ones(1), **CLIPS)
        value_and_slope = torch.stack([-loss, gradient(-loss, logps)[0]])
        check(f"A {advantage:+.0f}, r {ratio}, [objective, slope]", value_and_slope, by_hand)


def test_8_three_estimates_of_the_kl():
    """8. k3 has the KL's mean and, near ref, little variance; its gradient is that of another KL.
    The reference is (1/4, 1/2, 1/4): d = ref_logp - logp = (-log 2, log 2, 0). k1 = -d has the mean
    KL by definition, k2 = d^2 / 2 nearly; k3 = exp(d) - d - 1 adds exp(d) - 1 to k1, with the mean
    sum ref - 1 = 0. Their gradients differ, as autograd sees a sample's value, not how p draws it.
    The KL's gradient is E[-d s], s = grad log p (E[s] = 0). Autograd gets from a sample of each:
    - k1: s, of mean 0: no penalty
    - k2, and k3 r (UNBIASED_KL): -d s, the KL's gradient
    - k3: (1 - exp(d)) s, of mean p - ref: the gradient of KL(reference || policy)
    In a run: `kl` is right on average; its pull is the KL's own only with UNBIASED_KL = True.
    ---
    8. k3 是 KL 的无偏估计，在参考模型附近方差也小；但它的梯度属于另一个 KL。
    参考模型为 (1/4, 1/2, 1/4)：d = ref_logp - logp = (-log 2, log 2, 0)。k1 = -d 按定义无偏，
    k2 = d^2 / 2 略有偏差；k3 = exp(d) - d - 1 比 k1 多 exp(d) - 1，其均值为 sum ref - 1 = 0。
    梯度则不同，因为 autograd 只看到样本的值，看不到 p 怎样采样。
    KL 的梯度是 E[-d s]，s = grad log p（另有 E[s] = 0）。autograd 从每个样本得到的梯度：
    - k1：s，均值为 0：等于没有惩罚
    - k2，以及 k3 r（UNBIASED_KL）：-d s，就是 KL 的梯度
    - k3：(1 - exp(d)) s，均值 p - ref：是 KL(reference || policy) 的梯度
    训练时：`kl` 的值平均而言是对的；要梯度也是 KL 的，须设 UNBIASED_KL = True。"""
    logits, logp = policy()
    p, ref = logp.exp().detach(), torch.tensor([0.25, 0.5, 0.25]).log()
    of = logp, None, ref, torch.zeros(3), p  # with A = 0, w = p and kl_beta = 1 the loss is E[k3]
    k3_loss, stats = policy_loss(*of, **CLIPS | {"kl_beta": 1.0})
    unbiased, _ = policy_loss(*of, **CLIPS | {"kl_beta": 1.0, "unbiased_kl": True})
    k1, k2, k3 = logp - ref, (logp - ref) ** 2 / 2, stats["kl"]
    for name, k, mean, square in [
        ("k1", k1, "1/4 * log(2)", "3/4 * log(2)**2"),
        ("k2", k2, "3/8 * log(2)**2", "3/16 * log(2)**4"),
        ("k3", k3, "1/4 * log(2)", "1/2 * (log(2) - 1/2)**2 + 1/4 * (1 - log(2))**2"),
    ]:
        check(f"E {name}", p @ k, mean)
        check("  variance", p @ k**2 - (p @ k) ** 2, f"{square} - ({mean})**2")
    exact = "[3/8 * log(2), -5/16 * log(2), -1/16 * log(2)]"
    for name, loss, by_hand in [
        ("grad KL", logp.exp() @ (logp - ref), exact),
        ("E grad k1", p @ k1, "[1/2 - 1/2, 1/4 - 1/4, 1/4 - 1/4]"),
        ("E grad k2", p @ k2, exact),
        ("E grad(k3 r)", unbiased, exact),
        ("E grad k3", k3_loss, "[1/2 - 1/4, 1/4 - 1/2, 1/4 - 1/4]"),
        ("grad KL(reference || policy)", ref.exp() @ (ref - logp), "[1/4, -1/4, 0]"),
    ]:
        check(name, gradient(loss, logits), by_hand)


def test_9_length_bias():
    """9. LOSS_TYPE, the mean's denominator, decides whose mistakes are cheap.
    Two right and two wrong answers have 2 and 8 tokens: A = 1/2 and -1/2. "grpo" gives each answer
    one vote, which its tokens share: w = 1/(G T). So a token of a long wrong answer is pushed down
    a quarter as hard as one of a short wrong answer (and up, if right). "dapo": w = 1/N for all, so
    if one answer grows to 28, each push is halved. "dr_grpo": 1/(G MAX_COMPLETION_TOKENS), here 32.
    In a run: if answers grow longer but no better, LOSS_TYPE = "grpo" is a suspect.
    ---
    9. LOSS_TYPE 就是均值的分母，它决定谁犯错的代价小。
    两对两错，长度各为 2 和 8：A = 1/2 与 -1/2。"grpo" 给每条回答一票，由它的各个 token 平分：
    w = 1/(G T)。长的错误回答，每个 token 受的惩罚只有短的四分之一（正确的回答，鼓励也同样少）。
    "dapo" 取 w = 1/N，一视同仁：一条变成 28 个 token，所有推力都减半。
    "dr_grpo" 取 w = 1/(G MAX_COMPLETION_TOKENS)，这里上限 32，与长度无关。
    训练时：回答越来越长却不见好转，LOSS_TYPE = "grpo" 就值得怀疑。"""
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


def test_10_accumulation():
    """10. A mean of micro-batch means is no mean: count the whole step first, then only add.
    Completions of 1, 1 and 4 tokens have A = 1, 0, -1; "dapo" wants w = 1/6. If the micro-batches
    {1 1} and {4} are divided by their own counts and averaged, w is 1/2/2 and 1/4/2; with {1 4} and
    {1} it is 1/5/2 and 1/1/2, so the gradient depends on the cut. Divided by the step's counts, the
    parts add up, however it is cut. -d loss by hand: sum w A ([o = j] - p_j).
    In a run: MICRO_BATCH_TOKENS and the number of GPUs do not change the gradient.
    ---
    10. micro-batch 均值的均值不是均值：先数清整个一步，之后只做加法。
    三条回答有 1、1、4 个 token，A = 1、0、-1；"dapo" 要求 w = 1/6。切成 {1 1} 和 {4}，
    各求均值再平均，w 成了 1/2/2 和 1/4/2；切成 {1 4} 和 {1}，又成了 1/5/2 和 1/1/2。
    除以整个一步的计数，怎么切都一样。手算：-d loss = sum w A ([o = j] - p_j)。
    训练时：MICRO_BATCH_TOKENS 和 GPU 的数目不改变梯度。"""
    logits, logp = policy()
    T, ids, A = torch.tensor([1, 1, 4]), torch.tensor([1, 0, 2]), torch.tensor([1, 0, -1])
    right = "[3/6 * 1/2, 1/6 + 3/6 * 1/4, -4/6 + 3/6 * 1/4]"
    first = "[1/4 * 1/2, 1/4 + 1/4 * 1/4, -4/8 + 1/4 * 1/4]"
    second = "[3/10 * 1/2, 1/10 + 3/10 * 1/4, -4/10 + 3/10 * 1/4]"
    for name, cut, counts, by_hand in [
        ("{1 1} {4}, right", [[0, 1], [2]], [6, 6], right),
        ("{1 4} {1}, right", [[0, 2], [1]], [6, 6], right),
        ("{1 1} {4}, mean of means", [[0, 1], [2]], [2 * 2, 4 * 2], first),
        ("{1 4} {1}, mean of means", [[0, 2], [1]], [5 * 2, 1 * 2], second),
    ]:
        loss, of_dapo = 0, {"loss_type": "dapo", "sequences": 3, "max_completion_tokens": 8}
        for part, tokens in zip(cut, counts, strict=True):
            w_T = token_weights(T[part], **of_dapo, tokens=tokens) * T[part]  # T equal tokens
            loss += policy_loss(logp[ids[part]], None, None, A[part], w_T, **CLIPS)[0]
        check(name, gradient(-loss, logits), by_hand)


def test_11_train_every_token_that_was_drawn():
    """11. Train every token that was drawn, EOS too, or nothing rewards stopping.
    A baseline is free because E[d log p] = 0, a mean over all that is drawn. A policy writes a word
    w or EOS, 1/2 each, two tokens at most: "EOS" (probability 1/2), "w EOS" (1/4) or "w w" (1/4).
    R = 1, 1, 0, as "w w" is truncated. An EOS pushes its own logit by A/2, a w pushes it by -A/2.
    The mask `ids != pad` drops EOS if pad is EOS. With b = 0 the policy then unlearns to stop; with
    b = 3/4, the mean of R, it still learns it, but only because "w w" is pushed down.
    In a run: MASK_TRUNCATED = True drops "w w", and with it three quarters of the push to stop.
    ---
    11. 采到的 token 一个也不能漏，EOS 也要训练，否则“停下来”得不到奖励。
    基线无偏，靠的是 E[d log p] = 0：对采到的一切取平均。设策略以 1/2 的概率写词 w 或 EOS，
    最多两个 token："EOS"（概率 1/2）、"w EOS"（1/4）、"w w"（1/4，被截断）；R = 1、1、0。
    一个 EOS 对 EOS 的 logit 的推力是 A/2，一个 w 则是 -A/2。pad 就是 EOS 时，
    掩码 `ids != pad` 会丢掉 EOS：b = 0 时，策略越学越停不下来；
    b 取 R 的均值 3/4 时仍会学着停，但只是因为 "w w" 被压低。
    训练时：MASK_TRUNCATED = True 丢掉 "w w"，对“停下来”的推力只剩四分之一。"""
    eos = torch.zeros(2, requires_grad=True)  # logits of w and EOS
    ids, earned = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0])  # by token
    every = torch.tensor([1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 4])  # the completion's probability
    for name, w, b, by_hand in [
        ("all, b = 0", every, 0, "1/2 * 1/2 + 1/4 * (-1/2 + 1/2)"),
        ("all, b = 3/4", every, 3 / 4, "1/2 * 1/4 * 1/2 + 1/4 * -3/4 * (-1/2 - 1/2)"),
        ("no EOS, b = 0", every * (ids == 0), 0, "1/4 * -1/2"),
        ("no EOS, b = 3/4", every * (ids == 0), 3 / 4, "1/4 * 1/4 * -1/2 + 1/4 * 3/4"),
        ('no "w w", b = 3/4', every * earned, 3 / 4, "1/2 * 1/4 * 1/2 + 1/16 * (-1/2 + 1/2)"),
    ]:
        loss, _ = policy_loss(eos.log_softmax(0)[ids], None, None, earned - b, w, **CLIPS)
        check(name, gradient(-loss, eos)[1], by_hand)


if __name__ == "__main__":
    chinese = os.environ.get("LANG", "").startswith("zh")
    lessons = [value for name, value in vars().items() if name.startswith("test_")]
    print(__doc__.split("\n---\n")[chinese].strip(), end="\n\n\n")
    for lesson in lessons:
        text, meaning = inspect.getdoc(lesson).split("\n---\n")[chinese].rsplit("\n", 1)
        print(text, end="\n\n")
        lesson()
        print(f"\n{meaning}\n\n")
