"""A task with class Environment, or reply(item, turns): completions of several turns, in rounds.

    groups = stream_turns(policy, recipe, prompts, ...)    # yields what policy.stream does

Each completion has a separate Environment(item). A round samples a turn of each conversation that
lives, and then calls each reply(turn), which returns what follows, a text or a message, or None to
end the conversation. After a stop string the reply stands inside the model's turn; after EOS it is
a separate turn by the model's chat template. Ids are only appended; no text is tokenized again. The
task's ids are not trained on (docs/tasks.md).
"""

import contextlib
import itertools
from dataclasses import dataclass, field

from grpo.faults import SOONER, TaskError, TooSlow, mistake, task_file
from grpo.log import say
from grpo.models import stop_ids
from grpo.options.turns.replies import bridge
from grpo.options.turns.tools import Tools
from grpo.rewards import begin, environment_rewards, results
from grpo.sample import Prompt, Question, Sample
from grpo.task import opened_tag

MUST = "return what follows the model's turn, a text or a message with role and content, or None"
MAKE = "take a question and return an object with reply(turn), or with TOOLS"


@dataclass(eq=False)
class Conversation:
    """A completion of several turns while it grows."""

    question: Question
    opening: str = ""  # what the prompt has written of the next turn
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_model_token: list[bool] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    truncated: bool = False
    environment: object = None  # while it is open
    tools: Tools | None = None  # of its environment
    rewards: object = None  # its environment's

    def add(self, ids, logps, by_model, text):
        self.ids += ids
        self.logps += logps
        self.is_model_token += [by_model] * len(ids)
        self.turns.append(text)

    def sample(self):
        calls = (self.tools.calls, self.tools.failed) if self.tools else (0, 0)
        own = self.truncated, self.is_model_token, self.turns, calls
        return Sample(self.ids, self.logps, *own, environment=self.rewards)


# --- Rounds ---------------------------------------------------------------------------
def stream_turns(
    policy, recipe, prompts, *, group_size, max_sequences, max_new_tokens, seed, **settings
):  # fmt: skip
    """Yields (key, [Sample] * G) as policy.stream does; the key is a Question. All turns of a
    completion, the task's too, have at most `max_new_tokens` together. At most `max_sequences`
    conversations are open at once. Raises TaskError if the task fails."""
    settings |= {"max_sequences": max_sequences, "max_new_tokens": max_new_tokens}
    rounds = itertools.count()
    while begun := list(itertools.islice(prompts, max_sequences // group_size)):
        groups = [
            [Conversation(prompt.key, prompt.key.opening) for _ in range(group_size)]
            for prompt in begun
        ]
        living, size = list(itertools.chain(*groups)), group_size
        asked = [Prompt(group, prompt.ids) for group, prompt in zip(groups, begun, strict=True)]
        try:
            open_environments(recipe, living)
            while living:
                own = {"group_size": size, "seed": seed + next(rounds)}
                for chats, turns in policy.stream(iter(asked), **own, **settings):
                    for chat, turn in zip(chats, turns, strict=True):
                        chat.add(turn.ids, turn.logps, True, chat.opening + policy.text(turn))
                        chat.truncated = turn.truncated
                living = going_on(policy, recipe, living, max_new_tokens)
                for group in [group for group in groups if set(living).isdisjoint(group)]:
                    groups.remove(group)
                    yield group[0].question, [chat.sample() for chat in group]
                asked, size = [], 1
                for chat in living:
                    ids, left = chat.question.ids + chat.ids, max_new_tokens - len(chat.ids)
                    asked.append(Prompt([chat], ids, left))
        finally:  # also after an error or Ctrl-C, or if the stream is not read to its end
            with contextlib.suppress(TaskError):  # the error before it is the one to see
                close(recipe, itertools.chain(*groups), shared=True)


def going_on(policy, recipe, chats, limit):
    """Returns the conversations that have another turn, of those that have just had one. Adds the
    task's replies to them; rewards and closes the others. An environment whose reply has taken too
    long gives no reward."""
    replies, living = hear(recipe, [chat for chat in chats if not chat.truncated]), []
    for chat, reply in replies.items():
        if reply:
            last, tokenizer = chat.ids[-1], policy.tokenizer
            ids = bridge(tokenizer, policy.eos_ids, last, reply, recipe.chat_options)
            chat.truncated = len(chat.ids) + len(ids) >= limit
        if reply and not chat.truncated:
            chat.add(ids, [0.0] * len(ids), False, reply["content"])
            chat.opening = opened_tag(tokenizer, ids) if last in policy.eos_ids else ""
            living.append(chat)
    ended = [chat for chat in chats if chat not in living]
    reward(recipe, [chat for chat in ended if chat.truncated or chat in replies])
    close(recipe, ended)
    return living


# --- Environments ---------------------------------------------------------------------
def open_environments(recipe, chats):
    """Makes the environments of conversations that begin; an error leaves those that are made."""
    kind = getattr(recipe.task, "Environment", None)
    holds = lambda made: recipe.tools or callable(getattr(made, "reply", None))
    make = lambda chat: (kind, chat.question.item)
    for chat in chats if kind else ():
        for made in ask(recipe, [chat], "Environment", make, MAKE, holds).values():
            chat.environment = made
            chat.tools = Tools(recipe, made) if recipe.tools else None


def hear(recipe, chats):
    """Returns {conversation: the message that follows its last turn, or None}, without those whose
    reply takes too long."""

    def call_of(chat):
        if chat.environment is not None:
            return (chat.tools or chat.environment).reply, chat.turns[-1]
        return recipe.task.reply, chat.question.item, list(chat.turns)

    short = hasattr(recipe.task, "reply")
    chats = [chat for chat in chats if short or chat.environment is not None]
    replies = ask(recipe, chats, "reply", call_of, MUST, is_answer)
    return {chat: as_message(reply) for chat, reply in replies.items()}


def as_message(reply):
    """Returns what a task has replied as a message, or None."""
    if reply is None:
        return None
    message = reply if isinstance(reply, dict) else {"role": "user", "content": reply}
    text = message["content"].encode(errors="replace").decode()  # half a character
    return message | {"content": text}


def reward(recipe, chats):
    """Takes the rewards of the conversations' environments, if these give any."""
    if environment_rewards(recipe.task):
        chats = [chat for chat in chats if chat.environment is not None]
        call_of = lambda chat: (chat.environment.rewards, list(chat.turns))
        for chat, rewards in ask(recipe, chats, "rewards", call_of, "return rewards").items():
            chat.rewards = rewards


def close(recipe, chats, shared=False):
    """Calls close() of the environments that are open, if they have one, once."""

    def call_of(chat):
        environment, chat.environment = chat.environment, None
        return (environment.close,)

    chats = [chat for chat in chats if hasattr(chat.environment, "close")]
    ask(recipe, chats, "close", call_of, "end the environment", shared=shared)


def ask(recipe, chats, name, call_of, must, holds=lambda got: True, shared=False):
    """Makes the calls call_of(chat), each (function, *arguments), which are `name` in error texts.
    Returns {conversation: what it returned}, without those that take too long, which are logged.
    After the last, TaskError if a call has failed, or holds(result) is false."""
    seconds, what = recipe.c.REWARD_TIMEOUT_SECONDS, f"{name}() of {task_file(recipe.c.TASK)}"
    calls = [call_of(chat) for chat in chats]

    def mistaken(number, error=None, got=None):
        shown = ", ".join(f"{argument!r:.500}" for argument in calls[number][1:])
        call = f"{name}({shown}) for {chats[number].question.item!r:.500}"
        return mistake(recipe.c.TASK, call, must, error=error, got=got)

    found = results(seconds, what, begin(seconds, calls), shared=shared)
    for number, got in enumerate(found):
        if isinstance(got, TooSlow):
            say(
                f"{what} took more than REWARD_TIMEOUT_SECONDS, and counts as None:"
                f" {chats[number].question.item!r:.200} after {chats[number].turns!r:.200}"
            )
        elif isinstance(got, BaseException):
            raise mistaken(number, error=got) from got
        elif not holds(got):
            raise mistaken(number, got=got)
    return {c: got for c, got in zip(chats, found, strict=True) if not isinstance(got, TooSlow)}


def is_answer(got):
    message = isinstance(got, dict) and [got.get("role"), got.get("content")]
    return isinstance(got, str | None) or (message and all(isinstance(x, str) for x in message))


# --- Metrics ----------------------------------------------------------------------------
def turn_metrics(samples):
    """Returns means over completions of several turns: the number of the model's turns, whether the
    task has replied at all, and the number of tokens that it added; and the share of calls of TOOLS
    that failed."""
    masks, number = [sample.is_model_token or [True] for sample in samples], max(len(samples), 1)
    turns = [1 + sum(a < b for a, b in itertools.pairwise(mask)) for mask in masks]
    heard = [mask.count(False) for mask in masks]
    means = {"num_turns/mean": turns, "environment_tokens": heard}
    means |= {"tools/call_share": list(map(bool, heard))}
    means = {name: sum(values) / number for name, values in means.items()}
    made, failed = map(sum, zip((0, 0), *(sample.tool_calls for sample in samples), strict=True))
    if made:
        means["tools/failure_frequency"] = failed / made
    return means | {"num_turns/max": max(turns, default=0)}


# --- Preview --------------------------------------------------------------------------
def play(recipe, item, written):
    """Returns (turns, the environment's rewards, the roles of its turns) of a conversation in which
    the model's turns are the texts `written`."""
    chat, roles = Conversation(Question(-1, item, [])), []
    try:
        open_environments(recipe, [chat])
        for text in written:
            chat.turns.append(text)
            replies = hear(recipe, [chat])
            if not replies:
                raise TaskError(recipe.c.TASK, f"reply({text!r:.500})", "took too long", SOONER)
            if (reply := replies[chat]) is None:
                break
            chat.turns.append(reply["content"])
            roles.append(reply["role"])
        chat.turns = chat.turns[: len(chat.turns) - (len(chat.turns) % 2 == 0)]  # to the model's
        reward(recipe, [chat])
        return chat.turns, chat.rewards, roles[: len(chat.turns) // 2]
    finally:
        with contextlib.suppress(TaskError):
            close(recipe, [chat])


def is_open(c, turn):
    """Returns whether a reply stands inside the model's turn, which a stop string has ended."""
    return any(string in turn for string in c.STOP_STRINGS)


def show_turns(recipe, tokenizer, turns, roles):
    """Prints a conversation, its task's turns with what the chat template adds around them."""
    c, options = recipe.c, recipe.chat_options
    eos_ids = stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS)
    replies = zip(turns[1::2], roles, strict=True)
    for turn, told in zip(turns[::2], [*replies, None], strict=True):
        say(f"the model: {turn!r}")
        if told:
            reply, role = told
            inside = is_open(c, turn)
            ends = [None] if inside else eos_ids  # the turn's end is not repeated
            message = {"role": role, "content": reply}
            ids = [bridge(tokenizer, eos_ids, end, message, options) for end in ends]
            text = tokenizer.decode(min(ids, key=len), clean_up_tokenization_spaces=False)
            say(f"reply() {'inside that turn' if inside else f'as a {role} turn'}: {text!r}")
