"""Completions of several turns, for a task with `reply(item, turns)`: tools, games, environments.

    groups = stream_turns(policy, recipe, prompts, ...)    # yields what policy.stream does

When the model ends its turn, reply() returns the text that follows, or None to end the talk (one
conversation). `turns` has the texts so far: model, task, model, ... After a stop string the reply
stands inside the model's turn; after EOS it is a user turn by the model's chat template. Ids are
only appended; no text is tokenised again. The task's ids are not trained (docs/turns.md).
"""

import re
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import jinja2

from grpo.log import announced, in_background, say
from grpo.models import stop_ids
from grpo.rewards import SOONER, TaskError, called, task_file, timely
from grpo.sample import Sample

MUST = "return the text that follows the model's turn, or None to end the conversation"
MARK = "\u2402"  # a placeholder for the model's turn, to find its end in the chat template
# We wait for each reply until one takes longer than this. From then on replies arrive in any order,
# which decides the random numbers of the next turns: only a run with quick replies repeats exactly
QUICK_SECONDS = 0.05


# --- One talk -------------------------------------------------------------------------
@dataclass(eq=False)
class Talk:
    """One conversation: a completion of several turns while it grows."""

    prompt: tuple  # key and ids, as policy.stream takes them
    group: list  # all talks of the same group
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_model_token: list[bool] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    opening: str = ""  # what the chat template has written of the coming turn (models.opening_of)
    sample: Sample | None = None  # set when the talk has ended

    def add(self, ids, logps, by_model, text):
        self.ids, self.logps = self.ids + ids, self.logps + logps
        self.is_model_token = self.is_model_token + [by_model] * len(ids)
        self.turns = [*self.turns, text]


def ask(recipe, item, turns):
    """Returns the task's reply. TaskError if reply() fails, or returns neither a text nor None."""
    call = f"reply({item!r:.500}, {turns!r:.500})"
    reply = lambda: recipe.task.reply(item, list(turns))
    got = called(recipe.c.TASK, call, MUST, reply, lambda got: isinstance(got, str | None))
    return got and got.encode(errors="replace").decode()  # of a tool: perhaps half a character


def bridge(tokenizer, eos_ids, last, reply, options):
    """Returns the ids between two turns of the model, if the first turn ended with the id `last`.
    No text in the reply becomes a special token: it could end the turn and forge another one.
    `options` are the chat template's. SystemExit if the template can't hold the reply."""
    plain, reply = reply, without_specials(tokenizer, reply, eos_ids)
    if last not in eos_ids or not tokenizer.chat_template:
        return ids_in_pieces(tokenizer, reply)
    said = ("user", "."), ("assistant", MARK), ("user", reply)
    chat = [{"role": role, "content": text} for role, text in said]
    options = {"add_generation_prompt": True, "tokenize": False} | options
    try:
        _, marked, after = tokenizer.apply_chat_template(chat, **options).partition(MARK)
        reason = "it drops the model's turn or the reply"
    except jinja2.TemplateError as error:
        marked, after, reason = "", "", repr(error)
    if not marked or "".join(reply.split()) not in "".join(after.split()):
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


# --- All talks ------------------------------------------------------------------------
def stream_turns(policy, recipe, prompts, *, group_size, max_sequences, max_new_tokens, **settings):
    """Yields (key, [Sample] * G) as policy.stream does; the key is (index, item, ids). All
    turns of a completion, the task's too, have at most `max_new_tokens` together."""
    talks = Talks(policy, recipe, prompts, group_size, max_sequences, max_new_tokens)
    limits = {"max_sequences": max_sequences, "max_new_tokens": max_new_tokens}
    for begun, (turn,) in policy.stream(talks.begin(), group_size=1, **limits, **settings):
        talks.take(begun.pop(), turn)
        while talks.ended:
            yield talks.ended.popleft()
    yield from talks.ended  # ended by replies that came when no turn was left to sample


class Talks:
    """All talks: each is being sampled, waits for a reply, or is ready for its next turn. reply()
    runs in a thread; meanwhile its talk leaves its place in the batch to another one."""

    def __init__(self, policy, recipe, prompts, group_size, max_sequences, limit):
        self.policy, self.recipe, self.prompts = policy, recipe, prompts
        self.group_size, self.most, self.limit = group_size, max_sequences, limit
        self.ready, self.asked = deque(), []  # talks; (talk, Future of its reply, time of the call)
        self.ended = deque()  # groups, as stream_turns yields them
        self.running, self.quick = 0, True  # sequences now; whether all replies were quick

    def begin(self):
        """Yields (talks that begin a turn, ids, number of talks, token limit): the next turn of one
        talk, or the first turn of a group, whose prompt runs once; None if no turn can begin."""
        while True:
            self.hear()
            room = self.most - self.running >= self.group_size
            if self.ready:
                talk = self.ready.popleft()
                self.running += 1
                yield [talk], talk.prompt[1] + talk.ids, 1, self.limit - len(talk.ids)
            elif room and (prompt := next(self.prompts, None)):
                group = []
                opened = {"opening": self.recipe.opening(prompt[1])}
                group += [Talk(prompt, group, **opened) for _ in range(self.group_size)]
                self.running += self.group_size
                yield group[::-1], prompt[1], self.group_size, self.limit
            elif self.asked and not self.running:
                with announced(f"{len(self.asked)} replies of {task_file(self.recipe.c.TASK)}"):
                    answers = [answer for _, answer, _ in self.asked]
                    wait(answers, max(0, self.left(self.asked[0][2])), FIRST_COMPLETED)
            else:
                yield None

    def take(self, talk, turn):
        """Adds a sampled turn to its talk, and calls the task's reply() in a thread."""
        self.running -= 1
        talk.add(turn.ids, turn.logps, True, talk.opening + self.policy.text(turn))
        if turn.truncated:
            self.end(talk, truncated=True)
        else:
            answer = Future()
            in_background(self._reply, answer, talk.prompt[0][1], talk.turns)
            self.asked.append((talk, answer, time.monotonic()))
            self.quick = self.quick and bool(wait([answer], QUICK_SECONDS).done)
            self.hear()

    def _reply(self, answer, item, turns):
        try:
            answer.set_result(ask(self.recipe, item, turns))
        except BaseException as error:  # noqa: BLE001 (raised in the main thread, by hear)
            answer.set_exception(error)

    def hear(self):
        """Continues the talks whose replies have arrived. Raises TaskError if a reply takes too
        long; its thread is abandoned."""
        asked, self.asked, c = self.asked, [], self.recipe.c
        for talk, answer, when in asked:
            if answer.done():
                self.go_on(talk, answer.result())
            elif self.left(when) > 0:
                self.asked.append((talk, answer, when))
            else:
                call = f"reply({talk.prompt[0][1]!r:.500}, {talk.turns!r:.500})"
                slow = f"took more than {c.REWARD_TIMEOUT_SECONDS} s"
                raise TaskError(c.TASK, call, slow, SOONER)

    def left(self, when):
        return self.recipe.c.REWARD_TIMEOUT_SECONDS - (time.monotonic() - when)

    def go_on(self, talk, reply):
        """Begins the next turn, unless the task has ended the talk or the limit leaves no room."""
        tokenizer, eos_ids, last = self.policy.tokenizer, self.policy.eos_ids, talk.ids[-1]
        how, options = (tokenizer, eos_ids, last), self.recipe.chat_options
        ids = None if reply is None else bridge(*how, reply, options)
        talk.opening = self.recipe.opening(ids) if ids and last in eos_ids else ""
        if ids is None or len(talk.ids) + len(ids) >= self.limit:
            self.end(talk, truncated=ids is not None)
        else:
            talk.add(ids, [0.0] * len(ids), False, reply)
            self.ready.append(talk)

    def end(self, talk, truncated):
        talk.sample = Sample(talk.ids, talk.logps, truncated, talk.is_model_token, talk.turns)
        if all(group := [other.sample for other in talk.group]):
            self.ended.append((talk.prompt[0], group))


# --- Preview --------------------------------------------------------------------------
def play(recipe, item, said):
    """Returns the turns of a talk in which the texts `said` are the model's turns."""
    turns, seconds = [], recipe.c.REWARD_TIMEOUT_SECONDS
    for text in said:
        turns.append(text)
        with timely(seconds, f"reply() of {task_file(recipe.c.TASK)}"):
            reply = ask(recipe, item, turns)
        if reply is None:
            return turns
        turns.append(reply)
    return turns[:-1]


def show_turns(recipe, tokenizer, turns):
    """Prints a talk, the task's turns with the text that the chat template adds around them."""
    c, options = recipe.c, recipe.chat_options
    eos_ids = stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS)
    for said, reply in zip(turns[::2], [*turns[1::2], None], strict=True):
        say(f"the model: {said!r}")
        if reply is not None:
            inside = any(string in said for string in c.STOP_STRINGS)
            ends = [None] if inside else eos_ids  # its own end is not repeated
            ids = [bridge(tokenizer, eos_ids, end, reply, options) for end in ends]
            text = tokenizer.decode(min(ids, key=len), clean_up_tokenization_spaces=False)
            say(f"reply() {'inside that turn' if inside else 'as a user turn'}: {text!r}")
