"""A game of verifiers' own GymEnv in class Environment, and both played by the same script.

    python3 -m venv ../venv-vf && ../venv-vf/bin/pip install -e . verifiers==0.3.1
    ../venv-vf/bin/python -m benchmarks.verifiers_game    # compares turns and rewards
    ../venv-vf/bin/python -m tasks guess presets/guess.py OUT=runs/tiny_guess
    ../venv-vf/bin/python grpo_ref_split.py presets/demo.py presets/guess.py MODEL=runs/tiny_guess \
        TASK=benchmarks/verifiers_game.py RUN_DIR=runs/verifiers_game
"""

import asyncio
import itertools
import re

import verifiers.legacy as vf
from verifiers.envs.experimental.gym_env import GymEnv
from verifiers.legacy.clients import resolve_client


class Guess:
    """tasks/guess.py as a Gym game"""

    def reset(self, seed=0):
        self.secret, self.left = seed % 7 + 1, 3
        return "Guess my number, from 1 to 7. You have 3 guesses."

    def step(self, guess):
        self.left -= 1
        right = guess == self.secret
        said = "more" if self.secret > guess else "less"
        return said, float(right), right or not self.left, {}


ENV = GymEnv(
    Guess,
    action_parser=lambda text: int(re.fullmatch(r"<answer>(\d)</answer>", text)[1]),
    num_train_episodes=7,
    num_eval_episodes=7,
)
CLIENT = resolve_client(vf.ClientConfig())  # never called: the trainer samples


def load(split):
    return list(ENV.get_dataset() if split == "train" else ENV.get_eval_dataset())


def messages(item):
    return item["prompt"]


class Environment:
    def __init__(self, item):
        self.loop = asyncio.Runner()
        state = self.loop.run(ENV.init_state(item, CLIENT, "policy"))
        self.state = self.loop.run(ENV.setup_state(state)) or state
        self.prompt = self.state["prompt"]

    def add(self, turn):
        message = {"content": turn, "finish_reason": "stop", "is_truncated": False}
        response = vf.Response(id="", created=0, model="policy", message=message)
        self.loop.run(ENV.add_model_response(self.state, self.prompt, response))

    def reply(self, turn):
        self.add(turn)
        if not self.loop.run(ENV.is_completed(self.state)):
            seen = len(self.prompt) + 1
            self.prompt = self.loop.run(ENV.get_prompt_messages(self.state))
            if not self.loop.run(ENV.is_completed(self.state)):
                (reply,) = self.prompt[seen:]
                return {"role": reply.role, "content": reply.content}

    def rewards(self, turns):
        if len(turns) > 2 * len(self.state["trajectory"]):
            self.add(turns[-1])  # a truncated turn, which had no reply
        for call in ENV.cleanup, ENV.rubric.score_rollout, ENV.rubric.cleanup:
            self.loop.run(call(self.state))
        return self.state["reward"]

    def close(self):
        if self.state.get("completion") is None:  # not rewarded
            self.loop.run(ENV.cleanup(self.state))
        self.loop.close()


# --- The comparison -------------------------------------------------------------------
SAYS = [f"<answer>{n}</answer>" for n in (1, 3, 4, 6, 9)] + ["junk", ""]


class Scripted(vf.OpenAIChatCompletionsClient):
    def __init__(self, said):
        self.said, self.calls = said, 0

    async def get_response(self, *_, **__):
        self.calls += 1  # once more than the game has turns: the answer is not heard
        text = self.said[self.calls - 1] if self.calls <= len(self.said) else ""
        message = {"content": text, "finish_reason": "stop", "is_truncated": False}
        return vf.Response(id="", created=0, model="policy", message=message)


def theirs(item, said):
    state = asyncio.run(ENV.rollout(item, client := Scripted(said), "policy"))
    asyncio.run(ENV.rubric.score_rollout(state))
    return [message.content for message in state["completion"]], state["reward"], client.calls


def ours(item, said):
    environment, turns = Environment(item), []
    for text in said:
        turns.append(text)
        if (reply := environment.reply(text)) is None:
            break
        turns.append(reply["content"])
    reward = environment.rewards(turns)
    environment.close()
    return turns, reward, len(turns[::2])


def main():
    same = right = more = number = 0
    for item, said in itertools.product(load("train"), itertools.product(SAYS, repeat=3)):
        (turns, reward, calls), (texts, value, asked) = ours(item, said), theirs(item, said)
        number += 1
        same += reward == value and turns == texts[: len(turns)]
        right, more = right + reward, more + asked - calls
    print(f"{same} of {number} equal, {right:.0f} right; verifiers asks {more} times more")


if __name__ == "__main__":
    main()
