"""Handing out completions to sample: replicas take from one queue, wherever there is room."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dapo_megatron.rollout.driver import Driver, News, Order
from dapo_megatron.types import Completion, Group, Prompt, SampleRequest, Stopped


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: `num_samples` completions per prompt; `seed_name` separates the random
    numbers of different uses (training, each evaluation set)."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed_name: str

    def order(
        self, ticket: int, prompt: Prompt, sample: int, so_far: Completion | None = None
    ) -> Order:
        """To sample completion `sample`, or the rest of one."""
        request = SampleRequest(
            ticket=ticket,
            sample=sample,
            tokens=prompt.tokens,
            seed=sample_seed(
                self.seed_name, ticket, sample, 0 if so_far is None else len(so_far.tokens)
            ),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            so_far=so_far,
        )
        return Order(prompt, request)


def sample_seed(seed_name: str, ticket: int, sample: int, num_tokens: int = 0) -> int:
    """A seed in [0, 2^62) that depends on these alone, not on layout, replica or time. The rest of
    a completion, after `num_tokens`, has another than its beginning."""
    digest = hashlib.blake2b(
        f"{seed_name}/{ticket}/{sample}/{num_tokens}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 2


class Dispatcher:
    """One queue for all replicas, in ticket order. The same on every rank.

    `use` says what for (see `Driver.advance`).
    """

    def __init__(self, driver: Driver, use: str) -> None:
        self._driver = driver
        self._use = use
        self._queue: list[tuple[int, int, Order]] = []
        self._replica_of: dict[tuple[int, int], int] = {}
        self._running = [0] * driver.num_replicas

    @property
    def room(self) -> int:
        """Requests that engines could start now beyond those queued; negative if more are."""
        capacity = self._driver.max_sequences * self._driver.num_replicas
        return capacity - len(self._replica_of) - len(self._queue)

    def submit(self, orders: Iterable[Order]) -> None:
        """Queue completions to sample; lower tickets go first."""
        for order in orders:
            heapq.heappush(self._queue, (order.request.ticket, order.request.sample, order))

    def advance(self, grade: Sequence[tuple[int, Prompt, Completion]] = ()) -> News:
        """Fill the engines from the queue and run them until the next news."""
        news = self._driver.advance(self._hand_out(), grade, self._use)
        for ticket, completion in news.sampled:
            self._running[self._replica_of.pop((ticket, completion.sample))] -= 1
        return news

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Empty queue and engines: (ticket, unfinished completion) of what engines were at."""
        self._queue.clear()
        self._replica_of.clear()
        self._running = [0] * self._driver.num_replicas
        return self._driver.interrupt()

    def _hand_out(self) -> list[list[Order]]:
        """Orders by replica. The completions of a group stay together where they fit, to share the
        prompt in the engine's cache, on the replica with the most room."""
        orders: list[list[Order]] = [[] for _ in self._running]
        last_ticket, home = -1, 0
        while self._queue:
            if (ticket := self._queue[0][0]) != last_ticket or self._is_full(home):
                home = min(range(len(self._running)), key=self._running.__getitem__)
                last_ticket = ticket
            if self._is_full(home):
                break
            _, sample, order = heapq.heappop(self._queue)
            orders[home].append(order)
            self._replica_of[ticket, sample] = home
            self._running[home] += 1
        return orders

    def _is_full(self, replica: int) -> bool:
        return self._running[replica] >= self._driver.max_sequences


def sample_all(
    driver: Driver,
    tickets: Sequence[tuple[int, Prompt]],
    sampling: Sampling,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> list[Group]:
    """Sample and grade all of `tickets`; every rank gets the groups, in their order. The grade of
    a completion that could not be graded is None. `on_progress` is told how many are done. Raises
    Stopped, with the engines stopped, if a rank was asked to stop."""
    dispatcher = Dispatcher(driver, sampling.seed_name)
    dispatcher.submit(
        sampling.order(ticket, prompt, sample)
        for ticket, prompt in tickets
        for sample in range(sampling.num_samples)
    )
    completions: dict[int, dict[int, Completion]] = {ticket: {} for ticket, _ in tickets}
    missing = {ticket: sampling.num_samples for ticket, _ in tickets}
    done = 0
    while done < len(tickets):
        news = dispatcher.advance()
        if news.stop:
            dispatcher.interrupt()
            raise Stopped(f"stopped by {news.stop}")
        for ticket, completion in news.sampled:
            completions[ticket][completion.sample] = completion
        for ticket, sample, grade, _ in news.graded:
            completions[ticket][sample] = replace(completions[ticket][sample], grade=grade)
            missing[ticket] -= 1
            done += missing[ticket] == 0
        on_progress(done)
    return [
        Group(ticket, prompt, tuple(completions[ticket][i] for i in range(sampling.num_samples)))
        for ticket, prompt in tickets
    ]
