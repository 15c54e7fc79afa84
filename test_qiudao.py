"""求导 (qiudao, "to differentiate"): four lessons on what autograd sees when GRPO trains.

    python test_qiudao.py              # read the lessons
    python -m pytest test_qiudao.py    # check them: every number is asserted

Lessons 3 and 4 call the loss of grpo/loss.py. For tokens with ratio r = exp(logp - old_logp),
advantage A and weight w it is, without its KL term,

    loss = -sum w * min(r A, clip(r, 1 - CLIP_LOW, 1 + CLIP_HIGH) A)
"""

import inspect
import math

import torch

from grpo.loss import policy_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}  # kl_beta 0: no reference model


def same(got, want):
    """Asserts that the tensor `got` equals `want` to float32 precision. Returns `want`."""
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-6)
    return want


def test_1_detach_makes_a_target():
    """1. `detach` keeps a value and cuts its gradient: that makes it a target.

    Q-learning fits Q(s, a) to the target r + gamma * max Q(s', .), which contains the very Q that
    is being fitted. If the target is too high, the error shrinks in two ways: raise the estimate
    for now, or lower the estimate for the future. Autograd does both. Only the first is wanted: the
    future is the evidence, and evidence must not be edited until it agrees. So the target is
    detached; what remains is called the semi-gradient (Sutton and Barto, section 9.3).
    """
    now = torch.tensor(2.0, requires_grad=True)  # Q(s, a)
    future = torch.tensor([1.0, 4.0], requires_grad=True)  # Q(s', .) of two actions

    def loss_and_gradients(target):
        loss = 0.5 * (target - now) ** 2
        # materialize_grads: a tensor without a gradient gets zeros, not an error
        return loss, *torch.autograd.grad(loss, (now, future), materialize_grads=True)

    # With reward 1 and gamma 0.5, target = 1 + 0.5 * 4 = 3, error = 3 - 2 = 1, loss = 0.5 * 1 ** 2.
    # d loss / d now = -error = -1, d loss / d target = error = 1, and d target / d future is 0.5
    # for the larger Q, 0 for the other.
    target = 1.0 + 0.5 * future.max()
    semi_loss, semi_now, semi_future = loss_and_gradients(target.detach())
    full_loss, full_now, full_future = loss_and_gradients(target)
    print("                 semi-gradient   full gradient")
    print(f"loss             {same(semi_loss, 0.5):<15} {same(full_loss, 0.5)}")
    print(f"d loss/d Q(s, a) {same(semi_now, -1.0):<15} {same(full_now, -1.0)}")
    print(f"d loss/d Q(s',.) {same(semi_future, [0.0, 0.0])}      {same(full_future, [0.0, 0.5])}")
    print("The loss is the same, but descent on the right also lowers the future's estimate.")


def test_2_a_one_that_has_a_gradient():
    """2. exp(logp - logp.detach()) is always 1, and yet its gradient is the gradient of logp.

    The detached copy is a constant c that happens to equal logp, and the gradient of exp(logp - c)
    is exp(logp - c) = 1 times the gradient of logp. Multiplied by an advantage A this is REINFORCE.
    It is also why the first update on a rollout needs no second forward pass: old_logps =
    logps.detach() gives the right ratio and the right gradient. Without the detach, logp - logp is
    0 everywhere: the ratio is still 1, nothing looks wrong, and nothing ever learns.
    """
    logits = torch.tensor([math.log(2.0), 0.0, 0.0], requires_grad=True)  # softmax 1/2, 1/4, 1/4
    logp = torch.log_softmax(logits, 0)[0]  # the policy took action 0
    ratio = torch.exp(logp - logp.detach())
    undetached = torch.exp(logp - logp)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    # d log softmax_0 / d logit_j = [j == 0] - p_j: (1 - 1/2, -1/4, -1/4), times A = 2.
    print(f"ratio {same(ratio, 1.0)}; without the detach {same(undetached, 1.0)}")
    print(f"gradient of 2 * logp (REINFORCE) {same(gradient(2 * logp), [1.0, -0.5, -0.5])}")
    print(f"gradient of 2 * ratio            {same(gradient(2 * ratio), [1.0, -0.5, -0.5])}")
    print(f"without the detach               {same(gradient(2 * undetached), [0.0, 0.0, 0.0])}")


def test_3_the_loss_is_zero_and_the_model_learns():
    """3. The first GRPO loss is 0, and the model learns from it.

    At the first update every r is 1. With LOSS_TYPE "grpo" the loss is then minus the mean
    advantage, and as advantages are centred that is 0, for a good model and for a bad one. ("dapo"
    and "dr_grpo" give long completions more weight: theirs need not be 0, and means as little.) Its
    gradient is not 0, as each advantage multiplies the gradient of its own completion, and these
    differ. Below, each completion is sampled as often as its probability says, and the gradient is
    minus that of the expected reward. So watch the reward, not the loss. A zero-variance group, of
    equal rewards, has advantages 0 and teaches nothing.
    """
    # Two completions of one token: 0 has reward 1, 1 has reward 0. A group of 4 samples.
    logits = torch.zeros(2, requires_grad=True)  # probabilities 1/2, 1/2
    samples = torch.tensor([0, 1, 0, 1])
    rewards = 1.0 - samples
    advantages = rewards - rewards.mean()  # the std would scale the gradient, not turn it
    weights = torch.full((4,), 1 / 4)  # "grpo": 1 / (4 sequences x 1 token)
    logps = torch.log_softmax(logits, 0)[samples]
    loss, _ = policy_loss(logps, logps.detach(), None, advantages, weights, **CLIPS)
    (gradient,) = torch.autograd.grad(loss, logits)
    (of_reward,) = torch.autograd.grad(torch.softmax(logits, 0)[0], logits)
    after = torch.softmax(logits - gradient, 0)  # an SGD step of rate 1

    # With respect to logit 0, d logp_0 = 1 - 1/2 and d logp_1 = -1/2, so that -w A d logp is
    # -(1/4)(1/2)(1/2) or -(1/4)(-1/2)(-1/2): -1/16 for each of the 4, -1/4 in sum; logit 1 gets
    # the opposite. The expected reward is p_0, and d p_0 / d logit_0 = p_0 p_1 = 1/4.
    # After the step the logits are 1/4 and -1/4, and p_0 = 1 / (1 + exp(-1/2)) = 0.6224593.
    print(f"advantages {same(advantages, [0.5, -0.5, 0.5, -0.5])}, loss {same(loss, 0.0)}")
    print(f"gradient of the loss            {same(gradient, [-0.25, 0.25])}")
    print(f"gradient of the expected reward {same(of_reward, [0.25, -0.25])}")
    print(f"probabilities [0.5, 0.5], after one SGD step {same(after, [0.6224593, 0.3775407])}")


def test_4_clipping_stops_what_has_gone_far_enough():
    """4. Clipping stops a token that has moved far enough in the direction of A, and no other.

    The min takes the smaller of r A and clip(r) A. Where that is clip(r) A it is a constant, and
    the gradient is 0: above 1 + CLIP_HIGH if A > 0, which asks for a likelier token, and below
    1 - CLIP_LOW if A < 0. At the other two ends the policy has moved against A, and r A brings it
    back: its gradient with respect to logp is r A, as d r = r d logp, without a bound for a bad
    token that became likelier. The KL term is outside the min and is never clipped.
    """
    # The range is 0.8 to 1.28, so clip(r) is 0.8, 1 and 1.28 for r = 0.5, 1 and 1.5.
    table = [  # A, r, min(r A, clip(r) A), its gradient with respect to logp
        (1.0, 0.5, 0.5, 0.5),  # min(0.5, 0.8)
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 1.5, 1.28, 0.0),  # min(1.5, 1.28): likelier by half, enough
        (-1.0, 0.5, -0.8, 0.0),  # min(-0.5, -0.8): rarer by half, enough
        (-1.0, 1.0, -1.0, -1.0),
        (-1.0, 1.5, -1.5, -1.5),  # min(-1.5, -1.28): the wrong way, pushed back harder
    ]
    old_logps = torch.tensor([-2.0])
    print("    A     r   value  gradient")
    for advantage, ratio, value, slope in table:
        logps = (old_logps + math.log(ratio)).requires_grad_()
        advantages = torch.tensor([advantage])
        loss, _ = policy_loss(logps, old_logps, None, advantages, torch.ones(1), **CLIPS)
        (gradient,) = torch.autograd.grad(-loss, logps)
        same(torch.stack([-loss, gradient[0]]), [value, slope])
        clipped = "  clipped" if slope == 0 else ""
        print(f"{advantage:+5.1f} {ratio:5.1f} {value:7.2f} {slope:9.2f}{clipped}")


if __name__ == "__main__":
    for name, lesson in list(vars().items()):
        if name.startswith("test_"):
            print(inspect.getdoc(lesson), end="\n\n")
            lesson()
            print()
