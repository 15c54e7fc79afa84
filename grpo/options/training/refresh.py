"""REFERENCE_REFRESH_STEPS: the policy becomes the reference every N steps (iterative GRPO)."""

from grpo.options.workers.weights import load_weights, trained_weights
from grpo.reference import LocalReference


class RefreshedReference(LocalReference):
    def refresh(self):
        """Makes the policy, as it is now, the reference (algorithm 1, lines 2 and 3)."""
        self.load(trained_weights(self.policy.model))

    def weights(self):
        """Returns what load() takes, {name: CPU tensor}, of a reference that was refreshed."""
        own = self.adapters.tensors if self.adapters else dict(self.model.model.named_parameters())
        return {name: tensor.cpu() for name, tensor in own.items()}

    def load(self, tensors):
        if self.adapters:
            self.adapters.load(tensors)
        else:
            load_weights(self.model.model, tensors)
