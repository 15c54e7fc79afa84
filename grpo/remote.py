"""REF_SERVER: the reference is the model of ref_server.py, which scores while a rank samples."""

import json
import queue
from concurrent.futures import Future, wait

import requests

from grpo.client import Client, Refused, Wait
from grpo.log import in_background
from grpo.wire import check_facts, facts_of, pack_ids, unpack_logps

REQUEST_TOKENS = 1 << 16  # about the tokens of one request; a larger group is sent alone


class RemoteReference:
    """ref_server.py's model. A thread sends one request at a time: groups that are sampled
    meanwhile go together in the next one. If the server dies, the thread repeats its request."""

    part = "wait"

    def __init__(self, server, c, policy):
        self.server, self.info, self.temperature = server, server.info, c.TEMPERATURE
        if (bits := self.info.get("bits", 16)) != c.BASE_BITS:  # another model, by its log-probs
            self.info = self.info | {"model": f"{self.info['model']} in {bits} bits"}
        self.what = f"{self.info['model']} at {server.url}"
        self.asked, self.answers = queue.SimpleQueue(), []  # (group, its Future); Futures
        in_background(self._score)

    def ask(self, group):
        self.answers.append(answer := Future())
        self.asked.put((group, answer))

    def fill(self, groups, budget):
        """Waits for the log-probs of all groups. Raises what the server's last answer raised."""
        answers, self.answers = self.answers, []
        waiting = Wait(f"the reference's log-probs from {self.server.url}")
        for group, answer in zip(groups, answers, strict=True):
            while not wait([answer], timeout=1).done:
                waiting.sleep("it has not scored them yet", pause=0)
            group.take_ref_logps(answer.result())

    def _score(self):
        while True:
            request, tokens = [], 0
            while not request or not self.asked.empty() and tokens < REQUEST_TOKENS:
                request.append(self.asked.get())
                tokens += len(request[-1][0].prompt) + len(request[-1][0].ids)
            groups, answers = zip(*request, strict=True)
            try:
                found = self.server.score(groups, self.temperature)
                for answer, logps in zip(answers, found, strict=True):
                    answer.set_result(logps)
            except (Exception, SystemExit) as error:  # noqa: BLE001 (raised in the main thread)
                for answer in answers:
                    answer.set_exception(error)


def what_counts(info):
    """Returns what must stay equal when a server starts again: its weights, under any name."""
    return {k: v for k, v in (info or {}).items() if k != "model"}


class ReferenceClient(Client):
    """The client of ref_server.py."""

    command = "python ref_server.py"  # or train with REF_SERVER=None
    limit_of_body = "MAX_BODY_BYTES of ref_server.py"
    info = None  # /info's answer, once check() has accepted it

    def check(self, c, tokenizer):
        """Raises SystemExit if the reference does not fit the trainer's constants and tokenizer."""
        try:
            info = self.read(self.call("GET", "/info"), "model")
        except (requests.RequestException, SystemExit) as error:
            raise SystemExit(f"REF_SERVER = {self.url!r} can't be used: {error}") from error
        where = f"{info.get('model')} at {self.url}"
        check_facts(info, facts_of(tokenizer), where, c.MODEL)
        longest = c.MAX_PROMPT_TOKENS + c.MAX_COMPLETION_TOKENS
        if longest > (info.get("context") or longest):
            raise SystemExit(
                f"MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS = {longest} exceed the context of"
                f" {where}, {info['context']} tokens"
            )
        self.info = info

    def score(self, groups, temperature):
        """Returns the reference's log-probs (N,) of each group."""
        how = {"wait": self.limit, "temperature": temperature}
        request = {"data": pack_ids(groups), "params": how, "timeout": self.limit + 30}
        reply = self.call("POST", "/score", **request)
        if "X-Info" not in reply.headers:
            raise self.stranger(reply)
        now = json.loads(reply.headers["X-Info"])
        if what_counts(now) != what_counts(self.info):
            raise Refused(
                f"{self.url} now serves the reference {now}; at the start it was {self.info}:"
                " restart the server with that one"
            )
        return unpack_logps(reply.content, groups)
