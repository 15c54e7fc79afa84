"""What the tests of workers share: rank 0's side of them, with a policy that is one vector."""

import contextlib
import socket

import safetensors.torch
import torch
from fakes import MIXED, FakeEngine, a_recipe, prompts_of
from helpers import call

from grpo.options.workers.rank_0 import Workers
from grpo.options.workers.shared_settings import settings_of
from grpo.sample import Group, Sample
from grpo.wire import pack_group

SIZES = {"PROMPTS_PER_STEP": 4, "MAX_STALENESS": 2, "WAIT_LIMIT_SECONDS": 60}


class Policy(FakeEngine):
    """Its weights are a vector, which it proves to have by giving it away as log-probs."""

    dtype, noise, vocab_size = "float32", 1e-6, 400

    def __init__(self, version=0):
        super().__init__()
        self.model, self.loads, self.seeds = torch.nn.Module(), [], []
        self.model.w = torch.nn.Parameter(weights(version))

    def load(self, tensors):
        if tensors["w"].shape != (3,):
            raise ValueError("the weights are of another model")
        self.become(tensors["w"])
        self.loads.append(self.logps([], []))

    def become(self, w):
        self.model.w.data.copy_(w)  # in place, as a step of training does

    def logps(self, prompt, completion):
        return self.model.w.tolist()

    def stream(self, prompts, **settings):
        self.seeds.append(settings["seed"])
        return super().stream(prompts, **settings)


def weights(version):
    return torch.arange(3.0) - 5 - version


@contextlib.contextmanager
def serving(folder, *, outcomes=(MIXED,) * 9, run="run", trainer="http://127.0.0.1:0", **constants):
    """Runs rank 0's side in the block; -> it. Its `c.TRAINER` is where it serves."""
    own = SIZES | {"TRAINER": trainer, "RUN_DIR": str(folder)}
    recipe = a_recipe(prompts_of(outcomes), **own | constants)
    workers = Workers(recipe.c, recipe, Policy(), run)
    workers.proof = [5, 6], [3, 4, 5]  # what sample_proof would sample, once
    change(workers, TRAINER=f"http://127.0.0.1:{workers.server.effective_port}")
    try:
        yield workers
    finally:
        end(workers)


def change(workers, **constants):
    """Makes it go on with other constants."""
    workers.recipe = workers.recipe.others(**constants)
    workers.c, workers.settings = workers.recipe.c, settings_of(workers.recipe)


def end(workers):
    """Ends it as the end of its process does: connections that are kept alive break, too."""
    with contextlib.suppress(FileNotFoundError):  # a second time
        workers.close()
    for channel in list(workers.server.active_channels.values()):
        with contextlib.suppress(OSError):
            channel.socket.shutdown(socket.SHUT_RDWR)


def publish(workers, version):
    """Publishes the vector of `version`; -> its record."""
    workers.policy.become(weights(version))
    workers.publish(version)
    workers.finish()
    return workers.record


def sample_of(workers, number=0, *, reward_names=("correctness", "format"), ids=(7, 2), **changes):
    """-> the body of a group as a worker would sample it from prompt `number`."""
    samples = [Sample(list(ids), [-1.0] * len(ids)), Sample([7], [-1.0], True)]
    for sample, correct in zip(samples, (1.0, -1.0), strict=True):
        sample.rewards = dict.fromkeys(reward_names, 0.0) | {"correctness": correct}
    prompt = workers.recipe.prompts[number % len(workers.recipe.prompts)]
    facts = {"id": f"me-{number}", "run": workers.run, "sampler": "me", "outcome": "correctness"}
    group = Group(*prompt[:3], samples, **facts)
    vars(group).update(changes)
    return pack_group(group)


def post(workers, body):
    """-> (status, answer) of POST /group, without a socket."""
    status, _, answer = call(workers.app, "POST", "/group", body)
    return status, answer


def file_of(w):
    return safetensors.torch.save({"w": w})
