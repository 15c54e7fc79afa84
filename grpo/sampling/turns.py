"""Completions of several turns, for a task with `reply(item, turns)`: tools, games, environments.

    groups = stream_turns(policy, recipe, prompts, ...)    # yields what policy.stream does

When the model has ended its turn, the task's reply is what it is told next, or None: the talk has
ended. `turns` are the texts so far, the model's and the task's in turn. After a stop string the
reply stands inside the model's turn; after EOS it is a user turn by the model's chat template. Ids
are appended, and nothing is tokenised again. The task's ids are not trained (docs/turns.md).
"""

import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import jinja2

from grpo.log import announced, in_background, say
from grpo.models import stop_ids
from grpo.sampling.rewards import TaskError, called, task_file
from grpo.sampling.sampler import Completion

MUST = "return the text that the model is told next, or None to end the talk"
MARK = "\u2402"  # stands for the model's turn when its chat template is read
# Replies are awaited until one takes longer than this; later ones come in any order, and decide
# which random numbers a turn gets. So a run whose replies are quick repeats by its seed
QUICK_SECONDS = 0.05


# --- One talk -------------------------------------------------------------------------
@dataclass(eq=False)
class Talk:
    """A completion while it grows."""

    prompt: tuple  # key and ids, as policy.stream takes them
    group: list  # the talks of the prompt
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # whether the model has drawn an id
    turns: list[str] = field(default_factory=list)
    completion: Completion | None = None  # once it has ended

    def add(self, ids, logps, own, text):
        self.ids, self.logps = self.ids + ids, self.logps + logps
        self.own, self.turns = self.own + [own] * len(ids), [*self.turns, text]


def ask(recipe, item, turns):
    """Returns the task's reply. TaskError if it fails, or is neither a text nor None."""
    call = f"reply({item!r:.500}, {turns!r:.500})"
    reply = lambda: recipe.task.reply(item, list(turns))
    return called(recipe.c.TASK, call, MUST, reply, lambda got: isinstance(got, str | None))


def bridge(tokenizer, eos_ids, last, reply, options):
    """Returns the ids between two turns of the model, of which the first has ended with the id
    `last`. `options` are CHAT_TEMPLATE's. SystemExit if the template does not take the reply."""
    if last not in eos_ids or not tokenizer.chat_template:
        return tokenizer(reply, add_special_tokens=False)["input_ids"]
    said = ("user", "."), ("assistant", MARK), ("user", reply)
    chat = [{"role": role, "content": text} for role, text in said]
    options = {"add_generation_prompt": True, "tokenize": False} | options
    try:
        _, marked, after = tokenizer.apply_chat_template(chat, **options).partition(MARK)
        reason = "it loses the model's turn, or the reply"
    except jinja2.TemplateError as error:
        marked, after, reason = "", "", repr(error)
    if not marked or "".join(reply.split()) not in "".join(after.split()):
        raise SystemExit(
            f"the chat template of MODEL = {tokenizer.name_or_path!r} can't continue a chat with"
            f" reply()'s {reply!r:.200} ({reason}): end the model's turns by STOP_STRINGS, or give"
            " its tokenizer another template"
        )
    # The model has sampled what ends its turn: the end of a turn, or (GLM) the next one's role
    after = after.removeprefix(tokenizer.decode([last]))
    return tokenizer(after, add_special_tokens=False)["input_ids"]


# --- All talks ------------------------------------------------------------------------
def stream_turns(policy, recipe, prompts, *, group_size, max_sequences, max_new_tokens, **settings):
    """Yields (key, [Completion] * G) as policy.stream does. All turns of a completion together, the
    task's too, have at most `max_new_tokens`; the key is (index, item, ids)."""
    talks = Talks(policy, recipe, prompts, group_size, max_sequences, max_new_tokens)
    limits = {"max_sequences": max_sequences, "max_new_tokens": max_new_tokens}
    for begun, (turn,) in policy.stream(talks.begin(), group_size=1, **limits, **settings):
        talks.take(begun.pop(), turn)
        while talks.ended:
            yield talks.ended.popleft()
    yield from talks.ended  # by replies that came when no turn was left to sample


class Talks:
    """Talks that are sampled, wait for a reply, or may begin their next turn. A reply runs in a
    thread, and its talk leaves its place to others meanwhile."""

    def __init__(self, policy, recipe, prompts, group_size, max_sequences, limit):
        self.policy, self.recipe, self.prompts = policy, recipe, prompts
        self.group_size, self.most, self.limit = group_size, max_sequences, limit
        self.ready, self.asked = deque(), []  # talks; (talk, Future of a reply, when it was asked)
        self.ended = deque()  # groups, as stream_turns yields them
        self.running, self.quick = 0, True  # sequences now; whether all replies were quick

    def begin(self):
        """Yields (talks that begin a turn, ids, their number, limit of tokens): the next turn of a
        talk, or the first of a group, whose prompt runs once; None while there is none."""
        while True:
            self.hear()
            room = self.most - self.running >= self.group_size
            if self.ready:
                talk = self.ready.popleft()
                self.running += 1
                yield [talk], talk.prompt[1] + talk.ids, 1, self.limit - len(talk.ids)
            elif room and (prompt := next(self.prompts, None)):
                group = []
                group += [Talk(prompt, group) for _ in range(self.group_size)]
                self.running += self.group_size
                yield group[::-1], prompt[1], self.group_size, self.limit
            elif self.asked and not self.running:
                with announced(f"{len(self.asked)} replies of {task_file(self.recipe.c.TASK)}"):
                    answers = [answer for _, answer, _ in self.asked]
                    wait(answers, max(0, self.left(self.asked[0][2])), FIRST_COMPLETED)
            else:
                yield None

    def take(self, talk, turn):
        """Adds a turn that was sampled, and asks the task for its reply."""
        self.running -= 1
        talk.add(turn.ids, turn.logps, True, self.policy.text(turn))
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
        """Goes on with the talks whose replies have come. TaskError if one takes too long; its
        thread is abandoned."""
        asked, self.asked, c = self.asked, [], self.recipe.c
        for talk, answer, when in asked:
            if answer.done():
                self.go_on(talk, answer.result())
            elif self.left(when) > 0:
                self.asked.append((talk, answer, when))
            else:
                call = f"reply({talk.prompt[0][1]!r:.500}, {talk.turns!r:.500})"
                slow = f"took more than {c.REWARD_TIMEOUT_SECONDS} s (REWARD_TIMEOUT_SECONDS)"
                raise TaskError(c.TASK, call, slow, MUST)

    def left(self, when):
        return self.recipe.c.REWARD_TIMEOUT_SECONDS - (time.monotonic() - when)

    def go_on(self, talk, reply):
        """Begins the next turn, unless the task has ended the talk or there is no room for it."""
        how = self.policy.tokenizer, self.policy.eos_ids, talk.ids[-1]
        ids = None if reply is None else bridge(*how, reply, self.recipe.c.CHAT_TEMPLATE)
        if ids is None or len(talk.ids) + len(ids) >= self.limit:
            self.end(talk, truncated=ids is not None)
        else:
            talk.add(ids, [0.0] * len(ids), False, reply)
            self.ready.append(talk)

    def end(self, talk, truncated):
        talk.completion = Completion(talk.ids, talk.logps, truncated, talk.own, talk.turns)
        if all(group := [other.completion for other in talk.group]):
            self.ended.append((talk.prompt[0], group))


# --- Preview --------------------------------------------------------------------------
def play(recipe, item, said):
    """Returns the turns of a talk in which the model says these texts, one after the other."""
    turns = []
    for text in said:
        turns.append(text)
        reply = ask(recipe, item, turns)
        if reply is None:
            return turns
        turns.append(reply)
    return turns[:-1]


def show_turns(c, tokenizer, turns):
    """Prints a talk; the task's turns with what the chat template puts around them."""
    eos_ids = stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS)
    for said, reply in zip(turns[::2], [*turns[1::2], None], strict=True):
        say(f"the model: {said!r}")
        if reply is not None:
            inside = any(string in said for string in c.STOP_STRINGS)
            ends = [None] if inside else eos_ids  # of these the template's own is not repeated
            ids = [bridge(tokenizer, eos_ids, end, reply, c.CHAT_TEMPLATE) for end in ends]
            text = tokenizer.decode(min(ids, key=len), clean_up_tokenization_spaces=False)
            say(f"reply() {'inside its turn' if inside else 'as a user turn'}: {text!r}")
