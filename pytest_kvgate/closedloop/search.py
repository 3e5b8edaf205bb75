"""A search for the cheapest assignment of dense layers and a budget whose KL meets a limit.

Whatever is proposed was run. KL does not always fall when one more layer is dense: errors of two
layers may cancel. So what one run shows is only a hint as to what to run next, never a reason to
believe in an assignment, and the result is the cheapest of those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_kvgate.analysis.assignment import Assignment, Ending, Search, cheapest
from pytest_kvgate.analysis.effects import LayerShare, LoopRun, Variant
from pytest_kvgate.analysis.resident import LayerCache, Resident, resident
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.wording import percent
from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.closedloop.run import Loop

#: Is told each run before it starts: what is run, the number of the run from 1, and of how many.
BeforeRun = Callable[[Variant, int, int], None]

#: The layers that read one cache. It is whole as soon as one of them is dense, so all of them are.
Group = tuple[int, ...]

#: Sparse runs that a search makes, unless it is told otherwise.
MAX_RUNS = 40

#: Pages of an LRU pool, as a multiple of a step's, as a profile simulates it.
POOL = 2.0

SAVES_NOTHING = "its pages and what is free are as large as the whole cache, so nothing is saved"


class _OutOfRunsError(Exception):
    """The bound on the number of runs is reached."""


@dataclass(frozen=True)
class _Costs:
    """What one budget costs: ``least`` bytes, and ``extra`` bytes for each group that is dense.

    ``always`` are layers whose pages and metadata are as large as their cache, so they are dense.
    """

    budget: float
    least: float
    always: Group
    extra: Mapping[Group, float]

    def total(self, dense: Iterable[Group]) -> float:
        """Return the bytes of an assignment."""
        return self.least + sum(self.extra[group] for group in dense)

    def below(self, ceiling: float) -> Iterator[tuple[float, tuple[Group, ...]]]:
        """Yield every choice of dense groups but all of them that costs less, with its bytes."""
        groups = sorted(self.extra, key=lambda group: (self.extra[group], group))
        open_ends: list[tuple[int, float, tuple[Group, ...]]] = [(0, self.least, ())]
        while open_ends:
            start, total, dense = open_ends.pop()
            if total >= ceiling or len(dense) == len(groups):
                continue
            yield total, dense
            for place in range(start, len(groups)):
                more = total + self.extra[groups[place]]
                if more >= ceiling:  # so do all after it
                    break
                open_ends.append((place + 1, more, (*dense, groups[place])))


class _Runs:
    """The runs of one search: none twice, and no more than allowed."""

    def __init__(
        self,
        loop: Loop,
        selector: str,
        page_size: int,
        max_kl: float,
        max_runs: int,
        before_run: BeforeRun | None,
    ) -> None:
        self._loop = loop
        self._selector = selector
        self._grid = loop.settings.grid(page_size)
        self._max_kl = max_kl
        self._max_runs = max_runs
        self._before_run = before_run
        self._layers: dict[Variant, Mapping[int, LayerShare]] = {}
        self.tried: dict[Variant, Assignment] = {}

    @property
    def left(self) -> int:
        """How many more runs are allowed."""
        return self._max_runs - len(self.tried)

    @property
    def best(self) -> Assignment | None:
        """The cheapest assignment so far that meets the limit."""
        return cheapest(self.tried.values(), self._max_kl)

    @property
    def ceiling(self) -> float:
        """What an assignment must cost less than to be of use, in bytes."""
        best = self.best
        return self._whole if best is None else best.resident.total

    def variant(self, costs: _Costs, dense: Iterable[Group]) -> Variant:
        """Return the assignment that keeps these groups dense."""
        layers = {layer for group in dense for layer in group}
        dense_layers = tuple(sorted(layers.union(costs.always)))
        return Variant(self._grid.page_size, costs.budget, self._selector, dense_layers)

    def meets(self, costs: _Costs, dense: Sequence[Group]) -> bool:
        """Whether an assignment meets the limit; it is run unless it was before."""
        variant = self.variant(costs, dense)
        if variant not in self.tried:
            if not self.left:
                raise _OutOfRunsError
            if self._before_run is not None:
                self._before_run(variant, len(self.tried) + 1, self._max_runs)
            run = self._loop.run(variant)
            self._layers[variant] = run.layers
            self.tried[variant] = self._assignment(variant, run)
        return self.tried[variant].kl <= self._max_kl

    def by_harm(self, costs: _Costs) -> list[Group]:
        """Return the groups by the mass they lost when all were sparse, per byte, least first.

        That comes with a run that is made anyway, where running each layer sparse alone would cost
        as many runs as there are layers. It does not know what the mass was worth, so it only says
        in which order layers are given back: a wrong order costs runs or a layer, not the limit.
        """
        shares = self._layers[self.variant(costs, ())]

        def lost(group: Group) -> float:
            known = [shares[layer] for layer in group if layer in shares]
            mass = sum(share.lost / share.n_step for share in known if share.n_step)
            return mass / costs.extra[group]

        return sorted(costs.extra, key=lambda group: (lost(group), group))

    def costs(self, budget: float) -> _Costs:
        """Return what a budget costs at the context of the last step."""
        always: list[int] = []
        extra: dict[Group, float] = {}
        least = 0.0
        for cache in self._loop.caches:
            sparse = self._resident(budget, caches=(cache,)).total
            whole = self._resident(budget, cache.layers, caches=(cache,)).total
            least += min(sparse, whole)
            if cache.paged and sparse < whole:
                extra[cache.layers] = whole - sparse
            elif cache.paged:
                always += cache.layers
        return _Costs(budget, least, tuple(sorted(always)), extra)

    def roomier(self, pool: float) -> Resident | None:
        """Return what the best keeps resident with a pool of so many times k pages."""
        best = self.best
        if best is None:
            return None
        return self._resident(best.variant.budget, best.variant.dense_layers, pool=pool)

    @property
    def _whole(self) -> float:
        return self._resident(1.0).whole

    def _assignment(self, variant: Variant, run: LoopRun) -> Assignment:
        return Assignment(
            variant=variant,
            kl=run.effects.mean("kl"),
            kl_interval=run.effects.interval("kl"),
            top1=run.effects.mean("top1"),
            coverage=run.coverage,
            resident=self._resident(variant.budget, variant.dense_layers),
        )

    def _resident(
        self,
        budget: float,
        dense_layers: Sequence[int] = (),
        *,
        caches: Sequence[LayerCache] | None = None,
        pool: float = 1.0,
    ) -> Resident:
        return resident(
            self._loop.caches if caches is None else caches,
            self._grid,
            budget,
            self._loop.n_context,
            selector=self._loop.settings.registry.get(self._selector),
            dense_layers=dense_layers,
            pool=pool,
        )


def propose(
    loop: Loop,
    selector: str,
    page_size: int,
    budgets: Iterable[float],
    max_kl: float,
    *,
    max_runs: int = MAX_RUNS,
    pool: float = POOL,
    before_run: BeforeRun | None = None,
) -> Search:
    """Look for the assignment that keeps the least resident and whose mean KL is at most a limit.

    First all layers are run sparse, at each budget from the smallest on until one meets the limit.
    Then, from the largest budget that missed it on, all layers count as dense and are given back:
    all at once, then halves, down to single ones, as long as the limit holds. A budget is left when
    the layers that it needs dense keep no less resident than the best so far. That takes up to two
    runs per layer and budget, and few where few layers matter. Last, if the runs that are left
    suffice for everything cheaper that was not measured, it is run, cheapest first, and then
    nothing cheaper with these budgets meets the limit. Otherwise the result is the cheapest that
    was found, and another may be cheaper.

    Args:
        loop: the prompt, read once.
        selector: the name of a page selector, or of an oracle.
        page_size: in tokens.
        budgets: fractions of the context, one of which the layers get that are not dense.
        max_kl: the limit of the mean KL(dense‖sparse) in nats; more than the noise.
        max_runs: how many sparse runs to make at most.
        pool: the pool that the result's ``roomier`` is sized for, as a multiple of k pages.
        before_run: is told each run before it starts.

    Raises:
        ClosedLoopError: the limit is no more than noise, no budget can be run, or an argument is
            not accepted.
        EngineError: llama.cpp cannot run or rewind the model.
    """
    noise = loop.noise.mean("kl")
    budgets = sorted(set(budgets))
    _check(loop, selector, budgets, max_kl, max_runs, noise)
    runs = _Runs(loop, selector, page_size, max_kl, max_runs, before_run)
    undefined: dict[float, str] = {}
    defined: list[_Costs] = []
    for budget in budgets:
        costs = runs.costs(budget)
        problem: str | None = SAVES_NOTHING
        if costs.least < runs.ceiling:
            problem = loop.problem(runs.variant(costs, ()))
        if problem is None:
            defined.append(costs)
        else:
            undefined[budget] = problem
    if not defined:
        reasons = " ".join(
            f"{percent(budget)}: {why.rstrip('.')}." for budget, why in undefined.items()
        )
        raise ClosedLoopError(f"none of the budgets can be run. {reasons}")
    try:
        needed: set[Group] = set()
        for costs in reversed(_missed_by_all(runs, defined)):
            needed = _give_back(runs, costs, needed)
        ending = _run_the_rest(runs, defined)
    except _OutOfRunsError:
        ending = "max-runs"
    return Search(
        selector=selector,
        grid=loop.settings.grid(page_size),
        max_kl=max_kl,
        noise=noise,
        n_token=len(loop.noise.kl),
        n_context=loop.n_context,
        paged_layers=loop.paged_layers,
        tried=tuple(runs.tried.values()),
        undefined=undefined,
        max_runs=max_runs,
        ending=ending,
        pool=pool,
        roomier=runs.roomier(pool),
    )


def _check(
    loop: Loop,
    selector: str,
    budgets: Sequence[float],
    max_kl: float,
    max_runs: int,
    noise: float,
) -> None:
    known = (ORACLE, *loop.settings.registry, TOKEN_ORACLE)
    if selector not in known:
        raise ClosedLoopError(
            f"there is no selector {selector!r} to plan with. Accepted: {', '.join(known)}."
        )
    if not budgets or not all(0 < budget <= 1 for budget in budgets):
        raise ClosedLoopError(
            f"budgets to plan with: {list(budgets)}. A budget is a fraction of the context, above "
            "0 and up to 1; give one or more."
        )
    if max_runs < 1:
        raise ClosedLoopError(f"a search of {max_runs} runs measures nothing; allow 1 or more.")
    if not max_kl > noise:
        raise ClosedLoopError(
            f"a KL of {max_kl:.2g} cannot be told from noise: an edit that changes nothing moves "
            f"this model's next tokens by {noise:.2g} on average. Ask for a limit above that."
        )


def _missed_by_all(runs: _Runs, defined: Sequence[_Costs]) -> list[_Costs]:
    """Run all layers sparse at one budget after the other; return those that miss the limit.

    It ends with the first that meets it: the next ones keep more resident.

    Raises:
        _OutOfRunsError: no run is left.
    """
    missed = []
    for costs in defined:
        if runs.meets(costs, ()):
            break
        missed.append(costs)
    return missed


def _give_back(runs: _Runs, costs: _Costs, needed: set[Group]) -> set[Group]:
    """Make layers sparse, as long as the limit holds; return those that must stay dense.

    ``needed`` are those that must at a larger budget: they come last.

    Raises:
        _OutOfRunsError: no run is left.
    """
    dense = runs.by_harm(costs)
    halves = [group for group in dense if group not in needed], [g for g in dense if g in needed]
    pending = [part for part in halves if part]
    while pending:
        undecided = {group for part in pending for group in part}
        decided = {group for group in dense if group not in undecided}
        if costs.total(decided) >= runs.ceiling:
            return decided
        part = pending.pop(0)
        fewer = [group for group in dense if group not in part]
        if runs.meets(costs, fewer):
            dense = fewer
        elif len(part) > 1:
            middle = len(part) // 2
            pending[:0] = [part[:middle], part[middle:]]
    return set(dense)


def _run_the_rest(runs: _Runs, defined: Sequence[_Costs]) -> Ending:
    """Run everything cheaper that was not measured, cheapest first, if the runs left allow it."""
    rest: list[tuple[float, _Costs, tuple[Group, ...]]] = []
    for costs in defined:
        for total, dense in costs.below(runs.ceiling):
            if runs.variant(costs, dense) not in runs.tried:
                rest.append((total, costs, dense))
                if len(rest) > runs.left:
                    return "too-many-left"
    for _, costs, dense in sorted(rest, key=lambda item: item[0]):
        if runs.meets(costs, dense):
            break
    return "all-measured"
