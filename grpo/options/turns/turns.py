"""A task with class Environment, or reply(item, turns): completions of several turns.

    groups = stream_turns(policy, recipe, prompts, ...)    # yields what policy.stream does

Each completion has a separate Environment(item). When the model ends its turn, reply(turn) returns
what follows, a text or a message, or None to end the conversation. After a stop string the reply
stands inside the model's turn; after EOS it is a separate turn by the model's chat template. Ids
are only appended; no text is tokenized again. The task's ids are not trained (docs/turns.md).
"""

import functools
import json
import re
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import jinja2

from grpo.calls import (
    called,
    environment_rewards,
    task_file,
    timely,
)
from grpo.log import announced, in_background, say
from grpo.models import stop_ids
from grpo.sample import Prompt, Sample

MUST = "return what follows the model's turn, a text or a message with role and content, or None"
MARK = "\u2402"  # a placeholder for the model's turn, to find its end in the chat template
# We wait for each reply until one takes longer than this. From then on replies arrive in any order,
# which decides the random numbers of the next turns: only a run with quick replies repeats exactly
QUICK_SECONDS = 0.05


# --- Environments ---------------------------------------------------------------------
class OfReply:
    """The environment of a task with reply(item, turns), which keeps no state but the texts."""

    def __init__(self, task, item):
        self.task, self.item, self.turns = task, item, []

    def reply(self, turn):
        self.turns.append(turn)
        answer = self.task.reply(self.item, list(self.turns))
        self.turns.append(answer["content"] if isinstance(answer, dict) else answer)
        return answer


class Environment:
    """The task's environment of one completion, whose answers are checked. It is made with its
    first call: that may take long, and is made in the thread that calls reply()."""

    def __init__(self, recipe, item):
        self.recipe, self.item = recipe, item
        self.real, self.closed = None, False

    def _call(self, name, must, holds, *arguments):
        """Returns the result of a method. TaskError if it fails, or returns something else."""
        c, task = self.recipe.c, self.recipe.task
        if self.real is None:
            make = getattr(task, "Environment", functools.partial(OfReply, task))
            what = f"Environment({self.item!r:.500})"
            whole = "take a question and return an object with reply(turn), or with TOOLS"
            self.real = called(c.TASK, what, whole, lambda: make(self.item), has_reply)
            if self.closed:  # by the main thread, meanwhile
                self.close()
        shown = f"{name}({', '.join(f'{x!r:.500}' for x in arguments)}) for {self.item!r:.500}"
        return called(c.TASK, shown, must, lambda: getattr(self.real, name)(*arguments), holds)

    def reply(self, turn):
        """Returns None, or the message that follows the model's turn."""
        got = self._call("reply", MUST, is_answer, turn)
        if got is None:
            return None
        role, text = (got["role"], got["content"]) if isinstance(got, dict) else ("user", got)
        return {"role": role, "content": text.encode(errors="replace").decode()}  # half a character

    def rewards(self, turns):
        """Returns the environment's rewards of its completion; None without rewards()."""
        if not environment_rewards(self.recipe.task):
            return None
        return self._call("rewards", "return rewards", lambda got: True, turns)

    def close(self):
        """Calls the environment's close(), if it has one, once."""
        self.closed, real, self.real = True, self.real, None
        if hasattr(real, "close"):
            called(self.recipe.c.TASK, "close()", "end the environment", real.close)


def forget(environments, seconds):
    """Closes environments after an error, which is the one to see; waits `seconds` at most."""
    closing = [Future() for _ in environments]
    for done, environment in zip(closing, environments, strict=True):
        in_background(run, done, environment.close)
    if late := wait(closing, seconds).not_done:
        say(f"close() of {len(late)} environments has not ended after {seconds} s: left open")


def run(future, call, *arguments):
    """Sets a Future to the result of a call, or to its error, which result() raises."""
    try:
        future.set_result(call(*arguments))
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)


def has_reply(real):
    return callable(getattr(real, "reply", None))


def is_answer(got):
    message = isinstance(got, dict) and [got.get("role"), got.get("content")]
    return isinstance(got, str | None) or (message and all(isinstance(x, str) for x in message))


# --- One conversation -----------------------------------------------------------------
@dataclass(eq=False)
class Conversation:
    """A completion of several turns while it grows."""

    prompt: Prompt  # of its group
    group: list  # all conversations of the same group
    environment: Environment
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_model_token: list[bool] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    opening: str = ""  # what the chat template has written of the next turn (opening_of)
    sample: Sample | None = None  # set when the conversation has ended

    def add(self, ids, logps, by_model, text):
        self.ids, self.logps = self.ids + ids, self.logps + logps
        self.is_model_token = self.is_model_token + [by_model] * len(ids)
        self.turns = [*self.turns, text]


def bridge(tokenizer, eos_ids, last, message, options):
    """Returns the ids between two turns of the model, if the first turn ended with the id `last`.
    No text in the reply (`message`, role and content) becomes a special token: it could end the
    turn and forge another one. `options` are the chat template's. SystemExit if the template can't
    contain the reply."""
    plain = message["content"]
    reply = without_specials(tokenizer, plain, eos_ids)
    if last not in eos_ids or not tokenizer.chat_template:
        return ids_in_pieces(tokenizer, reply)
    turns = ("user", "."), ("assistant", MARK), (message["role"], reply)
    chat = [{"role": role, "content": text} for role, text in turns]
    options = {"add_generation_prompt": True, "tokenize": False} | options
    try:
        _, marked, after = tokenizer.apply_chat_template(chat, **options).partition(MARK)
        reason = "it drops the model's turn or the reply"
    except jinja2.TemplateError as error:
        marked, after, reason = "", "", repr(error)
    texts = reply, json.dumps(reply, ensure_ascii=False)  # Llama 3 writes a tool's result as JSON
    if not marked or not any("".join(x.split()) in "".join(after.split()) for x in texts):
        raise SystemExit(
            f"the chat template of MODEL = {tokenizer.name_or_path!r} can't continue a chat with"
            f" the reply {plain!r:.200} ({reason}): end the model's turns with STOP_STRINGS,"
            " which need no template, or give its tokenizer another template"
        )
    # The model has already sampled the end of its turn or (GLM) the role of the next turn
    return ids_in_pieces(tokenizer, after.removeprefix(tokenizer.decode([last])))


# --- A reply's ids ---------------------------------------------------------------------
CUT = "\ue000"  # a private character: text is tokenized in pieces, cut where it stands


def without_specials(tokenizer, text, eos_ids=()):
    """Returns the text with a CUT in each text of a special token, so that ids_in_pieces makes
    plain ids of it. Special is also what the chat template writes (DeepSeek's roles)."""
    template, added = str(tokenizer.chat_template), tokenizer.added_tokens_decoder.items()
    written = lambda text: len(text) > 1 and text in template
    texts = [str(x) for i, x in added if x.special or i in eos_ids or written(str(x))]
    texts = sorted((x for x in texts if not x.isspace()), key=len, reverse=True)
    text = text.replace(CUT, "\ufffd")
    special = re.compile("|".join(map(re.escape, texts)) or "$^")
    while found := special.search(text):  # again from the start: texts may overlap
        at = found.start() + (len(found[0]) > 1)  # a single character is left out
        text = text[:at] + CUT + text[found.start() + 1 :]
    return text


def ids_in_pieces(tokenizer, text):
    """Returns the ids of a text, tokenized in pieces between CUTs."""
    pieces = (tokenizer(piece, add_special_tokens=False) for piece in text.split(CUT))
    return [token for piece in pieces for token in piece["input_ids"]]


# --- All conversations ----------------------------------------------------------------
def stream_turns(policy, recipe, prompts, *, group_size, max_sequences, max_new_tokens, **settings):
    """Yields (key, [Sample] * G) as policy.stream does; the key is (index, item, ids). All
    turns of a completion, the task's too, have at most `max_new_tokens` together."""
    chats = Conversations(policy, recipe, prompts, group_size, max_sequences, max_new_tokens)
    limits = {"max_sequences": max_sequences, "max_new_tokens": max_new_tokens}
    try:
        for begun, (turn,) in policy.stream(chats.begin(), group_size=1, **limits, **settings):
            chats.take(begun, turn)
            while chats.ended:
                yield chats.ended.popleft()
        while chats.asked:  # that ended when no turn was left to sample
            chats.wait()
            chats.hear()
        yield from chats.ended
    finally:  # also after an error or Ctrl-C, or if the stream is not read to its end
        forget([chat.environment for chat in chats.open], recipe.c.REWARD_TIMEOUT_SECONDS)


class Conversations:
    """All conversations. Each is being sampled, waits for a reply, or is ready for its next turn.
    reply() runs in a thread. A conversation whose reply comes while a wave runs waits for the next.
    """

    def __init__(self, policy, recipe, prompts, group_size, max_sequences, limit):
        self.policy, self.recipe, self.prompts = policy, recipe, prompts
        self.group_size, self.most, self.limit = group_size, max_sequences, limit
        # Conversations; (one, Future of what its environment is asked, time of the call, what then)
        self.ready, self.asked = deque(), []
        self.open, self.ended = [], deque()  # conversations; groups, as stream_turns yields them
        self.running, self.quick = 0, True  # sequences now; whether all replies were quick
        self.drained = False  # whether `prompts` had none when it was last asked

    def begin(self):
        """Yields a Prompt, whose key has the conversations that begin a turn: one that goes on, or
        a group's for their first turn, whose prompt runs once; None if no turn can begin."""
        while True:
            while self.drained and self.asked and not self.running:
                self.wait()  # for all: those that answer later would wait for the next wave
                self.hear()
            self.hear()
            room = self.most - self.running >= self.group_size
            if self.ready and self.running < self.most:
                chat = self.ready.popleft()
                self.running += 1
                ids, limit = chat.prompt.ids + chat.ids, self.limit - len(chat.ids)
                yield Prompt((chat,), ids, limit=limit)
            elif room and (prompt := next(self.prompts, None)):
                group, opening = [], self.recipe.opening(prompt.ids)
                for _ in range(self.group_size):
                    environment = Environment(self.recipe, prompt.key.item)
                    group.append(Conversation(prompt, group, environment, opening=opening))
                self.open += group
                self.running += self.group_size
                yield Prompt(tuple(group), prompt.ids, self.group_size, self.limit)
            elif self.asked and not self.running:
                self.wait()
            else:
                self.drained = room
                yield None

    def wait(self):
        """Waits until an environment has answered, or has taken too long."""
        with announced(f"{len(self.asked)} replies of {task_file(self.recipe.c.TASK)}"):
            answers = [answer for _, answer, *_ in self.asked]
            oldest = min(when for _, _, when, _ in self.asked)
            wait(answers, max(0, self.left(oldest)), FIRST_COMPLETED)

    def take(self, begun, turn):
        """Adds a sampled turn to its conversation, and asks its environment for the reply. Of a
        group that has `begun` it is any without a turn: they are equal until then."""
        chat = begun[0] if len(begun) == 1 else next(c for c in begun if not c.ids)
        self.running -= 1
        chat.add(turn.ids, turn.logps, True, chat.opening + self.policy.text(turn))
        if turn.truncated:
            self.end(chat, truncated=True)
        else:
            self.ask(chat, self.go_on, chat.environment.reply, chat.turns[-1])
        self.hear()

    def ask(self, chat, then, call, *arguments):
        """Makes a call in a thread; hear() gives its result to then(chat, result)."""
        answer = Future()
        in_background(run, answer, call, *arguments)
        self.asked.append((chat, answer, time.monotonic(), then))
        self.quick = self.quick and bool(wait([answer], QUICK_SECONDS).done)

    def hear(self):
        """Continues the conversations whose environments have answered, and ends those whose
        environments take too long. Raises TaskError if one has failed."""
        asked, self.asked = self.asked, []
        for number, (chat, answer, when, then) in enumerate(asked):
            if answer.done():
                then(chat, answer.result())
            elif self.left(when) > 0:
                self.asked.append(asked[number])
            else:
                self.give_up(chat)

    def give_up(self, chat):
        """Ends a conversation as if its environment had returned None. The thread is abandoned."""
        call = "reply()" if chat.sample is None else "Environment.rewards() or close()"
        say(
            f"{call} took more than REWARD_TIMEOUT_SECONDS, and counts as None:"
            f" {chat.prompt.key.item!r:.200} after {chat.turns!r:.200}"
        )
        chat.sample = chat.sample or self.sample_of(chat, truncated=False)
        in_background(run, Future(), chat.environment.close)
        self.leave(chat, None)

    def left(self, when):
        return self.recipe.c.REWARD_TIMEOUT_SECONDS - (time.monotonic() - when)

    def go_on(self, chat, reply):
        """Begins the next turn, unless the task has ended the conversation (`reply` is None) or the
        limit leaves no room."""
        tokenizer, eos_ids, last = self.policy.tokenizer, self.policy.eos_ids, chat.ids[-1]
        how, options = (tokenizer, eos_ids, last), self.recipe.chat_options
        ids = None if reply is None else bridge(*how, reply, options)
        chat.opening = self.recipe.opening(ids) if ids and last in eos_ids else ""
        if ids is None or len(chat.ids) + len(ids) >= self.limit:
            self.end(chat, truncated=ids is not None)
        else:
            chat.add(ids, [0.0] * len(ids), False, reply["content"])
            self.ready.append(chat)

    def end(self, chat, truncated):
        """Asks for the environment's rewards, and closes it."""
        chat.sample = self.sample_of(chat, truncated)
        if hasattr(self.recipe.task, "Environment"):
            self.ask(chat, self.leave, self._last, chat)
        else:
            self.leave(chat, None)

    def sample_of(self, chat, truncated):
        tools = getattr(chat.environment.real, "_grpo_tools", None)  # options/tools.py's
        calls = (tools.calls, tools.failed) if tools else (0, 0)
        own = chat.is_model_token, chat.turns, calls
        return Sample(chat.ids, chat.logps, truncated, *own)

    def _last(self, chat):
        rewards = chat.environment.rewards(list(chat.turns))
        chat.environment.close()
        return rewards

    def leave(self, chat, rewards):
        chat.sample.environment = rewards
        self.open.remove(chat)
        if not any(other in self.open for other in chat.group):
            self.ended.append((chat.prompt.key, [other.sample for other in chat.group]))


# --- Preview --------------------------------------------------------------------------
def play(recipe, item, written, truncated=False):
    """Returns (turns, the environment's rewards, the roles of its turns) of a conversation in which
    the model's turns are the texts `written`; there is no reply to a last one that is `truncated`.
    """
    turns, roles = [], []
    environment, seconds = Environment(recipe, item), recipe.c.REWARD_TIMEOUT_SECONDS
    what, replies = f"reply() of {task_file(recipe.c.TASK)}", len(written) - truncated
    try:
        for number, text in enumerate(written):
            turns.append(text)
            with timely(seconds, what):
                reply = environment.reply(text) if number < replies else None
            if reply is None:
                break
            turns.append(reply["content"])
            roles.append(reply["role"])
        turns = turns[: len(turns) - (len(turns) % 2 == 0)]  # ends with the model
        with timely(seconds, f"Environment.rewards() of {task_file(recipe.c.TASK)}"):
            return turns, environment.rewards(list(turns)), roles[: len(turns) // 2]
    finally:
        forget([environment], seconds)


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
