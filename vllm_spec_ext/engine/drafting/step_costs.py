# SPDX-License-Identifier: Apache-2.0
"""What a decoding step costs here and now: a plain one, and one that verifies draft tokens.

For each class of batch sizes the time of a step is modelled as

    plain + overhead * (any drafts) + per_token * drafts

and followed by a Kalman filter. The machine and the context change the time of all steps together,
by a third within minutes, while the ratio of verification to plain decoding moves slowly; the
filter is told so, hence each step, plain or not, says how fast the machine is now. A pause that
hits one step (compilation, another program) is left out; the first times are taken as a median.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_STEPS = 3  # plain steps of a fresh engine; their median ignores one pause
_FIRST_NOISE = 0.12  # spread of one step's time, relative, until it is measured
_DRIFT = 0.005  # what the machine's speed changes in a step, relative
_OVERHEAD_DRIFT = 0.0005  # the same for the overhead of a step with drafts, in plain steps
_TOKEN_DRIFT = 0.001  # and for the cost of a token, relative to itself
_LEAST_DRIFTING = 0.02  # a token in plain steps: one that costs less drifts as much
_FIRST_OVERHEAD, _FIRST_REQUEST = 0.05, 0.2  # plain steps: errors of these first guesses
_MOST_FREE = 0.15  # plain steps: what rows that cost nothing make of the line, at n = 0
_LEAST_TOKEN = -0.01  # plain steps: noise, where tokens cost nothing
_UNSURE = 2.0  # times these, and the first cost of a token: the most that errors grow to
_FIRST_TOKEN_COST = 0.05  # a draft token in plain steps, before one was measured; high on purpose
_LONG = 100  # steps without drafts from which on what they cost is doubted
_FADE = 0.002  # of what they cost beyond the first guess, a step: how soon it is forgotten
_FADE_OF_GUESS = 0.01  # the same of a guess that no step with drafts was measured for ...
_LEAST_GUESS = 0.3  # ... down to this part of it: with less, first drafts may cost too much at once
_HOPE, _KEPT_HOPE = 0.002, 0.9  # of what is left, a step: how it grows, and what drafts leave of it
_ENOUGH = 0.11  # relative error of the plain time below which payoffs can be told
_OUTLIER = 5.0  # standard deviations
_CLIP = 2.5
_JUMP = 3  # outliers in a row that are taken for a new speed

_Four = tuple[float, float, float, float]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


@dataclass(frozen=True)
class CostEstimate:
    """Costs at one batch size, those of drafts in plain steps of that batch size."""

    plain_s: float
    plain_error: float  # relative standard error
    num_measured: int  # steps with drafts that this rests on
    _overhead: float  # of any drafts, in plain steps; an estimate, which may be below 0
    _per_token: float
    _variance: tuple[float, float, float]  # of the cost of n tokens: coefficients of 1, n, n * n
    _hoped_per_token: float

    @property
    def per_token(self) -> float:
        """One more draft token, in plain steps."""
        return max(0.0, self._per_token)

    @property
    def hoped_per_token(self) -> float:
        """The same; after many steps without drafts less, so that some are made and measured.

        A proposer that is told that no draft can pay makes none, and nothing would ever say that
        the few steps this rests on were slow by chance. What may be lost goes by the other one.
        """
        return max(0.0, self._hoped_per_token)

    def extra(self, num_drafted: int) -> float:
        """What verifying this many draft tokens adds to a step, in plain steps."""
        return max(0.0, self._overhead + self._per_token * num_drafted) if num_drafted else 0.0

    def error(self, num_drafted: int) -> float:
        """Standard error of :meth:`extra`."""
        if not num_drafted:
            return 0.0
        constant, linear, square = self._variance
        return math.sqrt(max(0.0, constant + (linear + square * num_drafted) * num_drafted))


class _SizeClass:
    """Filter of one class: plain time, overhead, cost of a token, further cost of a request.

    Cost of a request means of one beside its token: a request more is a token more, too.
    Plain floats: this runs in every step, and for four numbers arrays take ten times as long.
    """

    def __init__(
        self,
        num_requests: int,
        state: _Four,
        errors: _Four,
        now: int,
        *,
        token_is_known: bool = False,
    ) -> None:
        """Start from guesses.

        Args:
            num_requests: Reference batch size.
            state: Seconds.
            errors: Standard errors of the guesses, in seconds.
            now: Number of the step.
            token_is_known: The cost of a token was measured at another batch size.
        """
        self._token_is_known = token_is_known
        self.num_requests = num_requests
        self.state = state
        self.covariance = [[0.0] * 4 for _ in range(4)]
        for i, error in enumerate(errors):
            self.covariance[i][i] = error * error
        self.updated = now
        self.num_measured = 0
        self._since_drafts = 0  # steps
        self._hope = 0.0  # that a token costs as little as it may, from 0 to 1
        self._outliers = [0, 0]  # in a row, of plain steps and of those with drafts
        self._noise = _FIRST_NOISE

    def estimate(self, num_requests: int, now: int) -> CostEstimate:
        """Costs at a batch size of this class."""
        more = num_requests - self.num_requests
        row = (1.0, 0.0, more, more)
        plain = max(_dot(row, self.state), 0.1 * self.state[0])
        variance = _dot(row, self._covariance_with(row)) / plain**2
        variance += (now - self.updated) * _DRIFT**2  # it may be long ago
        overhead, per_token = self.state[1] / plain, self.state[2] / plain
        least = _LEAST_GUESS * _first_token(self.num_requests) * self.state[0] / plain
        hoped = per_token - self._hope * max(0.0, per_token - least)
        # Slopes of the cost of n tokens by the four parts of the state: those at 0, and by n.
        at_0 = (-overhead, 1.0, -overhead * more, -overhead * more)
        by_n = (-per_token, 0.0, 1.0 - per_token * more, -per_token * more)
        by_n_covariance = self._covariance_with(by_n)
        constant = _dot(at_0, self._covariance_with(at_0)) / plain**2
        linear = 2 * _dot(by_n_covariance, at_0) / plain**2
        square = _dot(by_n_covariance, by_n) / plain**2
        return CostEstimate(
            plain,
            math.sqrt(max(0.0, variance)),
            self.num_measured,
            overhead,
            per_token,
            (constant, linear, square),
            hoped,
        )

    def observe(self, num_requests: int, num_drafted: int, seconds: float, now: int) -> None:
        """Learn from one step."""
        more = num_requests - self.num_requests
        has_drafts = num_drafted > 0
        row = (1.0, float(has_drafts), num_drafted + more, more)
        self._drift(now)
        expected = max(_dot(row, self.state), 0.1 * self.state[0])
        covariances = self._covariance_with(row)
        spread = self._spread(row, covariances, expected)
        surprise = (seconds - expected) / spread
        if surprise > _OUTLIER:
            self._outliers[has_drafts] += 1
            if self._outliers[has_drafts] < _JUMP:
                return
        if abs(surprise) > _OUTLIER:
            # Slower for good, or faster, which no pause can feign: forget how fast it was. Where
            # there are drafts it may be them; the next plain step tells.
            self._add_covariance(((seconds - expected) / expected) ** 2, self.state)
            if has_drafts:
                most = _first_token(self.num_requests) * self.state[0]
                self.covariance[2][2] += min(most, abs(seconds - expected) / num_drafted) ** 2
            covariances = self._covariance_with(row)
            spread = self._spread(row, covariances, expected)
            surprise = (seconds - expected) / spread
        self._outliers[has_drafts] = 0
        self.num_measured += has_drafts
        self._since_drafts = 0 if has_drafts else self._since_drafts + 1
        if has_drafts:
            self._hope *= _KEPT_HOPE
        if self._since_drafts > _LONG:
            self._hope += _HOPE * (1.0 - self._hope)
            self._doubt_dear_drafts()
        surprise = min(_CLIP, max(-2 * _CLIP, surprise))
        self._noise *= math.sqrt(0.96 + 0.04 * min(surprise**2, _CLIP**2))
        self._noise = min(0.2, max(0.02, self._noise))
        step = surprise / spread
        a, b, c, d = self.state
        e, f, g, h = covariances
        self.state = (a + e * step, b + f * step, c + g * step, d + h * step)
        self._add_covariance(-1.0 / spread**2, covariances)
        self._keep_within_reason()

    def _keep_within_reason(self) -> None:
        """Of what drafts cost, believe nothing that cannot be, and be about as sure as at first.

        Beside other programs times jump, and with them these estimates and their errors. They would
        stay so: drafts that may cost so much are not allowed, and only drafts would tell.
        """
        plain, overhead, token, request = self.state
        missing = -_MOST_FREE * plain - overhead
        if missing > 0.0:  # then a token costs less, as what the usual drafts cost is known
            overhead += missing
            token += missing * self.covariance[1][2] / max(self.covariance[1][1], 1e-30)
        # One token more takes no longer than what all of a plain step takes for each request.
        token = max(_LEAST_TOKEN * plain, min(token, plain / self.num_requests))
        self.state = (plain, overhead, token, request)
        first = (
            _FIRST_OVERHEAD,
            _first_token(self.num_requests),
            _FIRST_REQUEST / self.num_requests,
        )
        for i, error in enumerate(first, 1):
            variance, most = self.covariance[i][i], _UNSURE * error * plain
            if variance <= most * most:
                continue
            factor = most / math.sqrt(variance)
            for j in range(4):
                self.covariance[i][j] *= factor
                self.covariance[j][i] *= factor

    @property
    def guesses_token(self) -> bool:
        """No step with drafts was measured, here or where its cost comes from."""
        return not (self._token_is_known or self.num_measured)

    def _spread(self, row: _Four, covariances: _Four, expected: float) -> float:
        # Rounding leaves a little below 0 where the machine's speed changed a thousandfold.
        return math.sqrt(max(0.0, _dot(row, covariances)) + (self._noise * expected) ** 2)

    @property
    def is_sound(self) -> bool:
        """Whether a plain step takes any time, by what is known.

        A step with drafts of another speed, long after the last one, may be shared out wrongly.
        """
        return self.state[0] > 0.0

    def _covariance_with(self, row: _Four) -> _Four:
        """The covariance matrix times a vector."""
        a, b, c, d = self.covariance
        return _dot(a, row), _dot(b, row), _dot(c, row), _dot(d, row)

    def _add_covariance(self, factor: float, direction: _Four) -> None:
        """Be less sure (or surer, if below 0) along a direction."""
        for line, part in zip(self.covariance, direction, strict=True):
            scaled = factor * part
            for i in range(4):
                line[i] += scaled * direction[i]

    def _doubt_dear_drafts(self) -> None:
        """There were no drafts for long: what they cost beside another program may be over.

        A first guess that is too high may be why there were none, as proposers leave out what it
        says cannot pay; so where nothing was measured it is doubted itself.
        """
        plain, overhead, token, request = self.state
        sure, fade = _first_token(self.num_requests) * plain, _FADE
        if self.guesses_token:
            sure, fade = _LEAST_GUESS * sure, _FADE_OF_GUESS
        excess = max(0.0, token - sure)
        self.state = (
            plain,
            min(overhead, (1.0 - _FADE) * overhead),
            token - fade * excess,
            request + fade * excess,  # what a request more costs is known better
        )

    def _drift(self, now: int) -> None:
        elapsed = max(1, now - self.updated)
        self.updated = now
        self._add_covariance(elapsed * _DRIFT**2, self.state)
        self.covariance[1][1] += elapsed * (_OVERHEAD_DRIFT * self.state[0]) ** 2
        token = max(self.state[2], _LEAST_DRIFTING * self.state[0])
        self.covariance[2][2] += elapsed * (_TOKEN_DRIFT * token) ** 2


def _first_token(num_requests: int) -> float:
    """Guess of what a draft token costs, in plain steps."""
    return min(_FIRST_TOKEN_COST, 0.5 / num_requests)


class StepCosts:
    """Running estimates for one engine."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self._classes: dict[int, _SizeClass] = {}  # by the number of bits of the batch size
        self._first: dict[int, list[float]] = {}  # plain times before anything is known
        self._estimates: dict[int, CostEstimate] = {}  # of this moment, by batch size
        self._now = 0

    def observe(self, num_requests: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step that only decoded.

        Args:
            num_requests: Requests in the step.
            num_drafted: Draft tokens of all requests that were verified.
            seconds: The step without the time of drafting.
        """
        if num_requests < 1 or seconds <= 0.0:
            return
        self._now += 1
        self._estimates.clear()
        key = num_requests.bit_length()
        if key not in self._classes and not self._start(num_requests, num_drafted, seconds):
            return
        self._classes[key].observe(num_requests, num_drafted, seconds, self._now)
        if not self._classes[key].is_sound:
            del self._classes[key]  # the next step opens it again
            self._first.pop(key, None)

    def estimate(self, num_requests: int) -> CostEstimate | None:
        """Costs at this batch size, guessed from the nearest known one; None = nothing known."""
        if num_requests < 1:
            return None  # a step of unfinished prefills
        if num_requests not in self._estimates:
            found = self._classes.get(num_requests.bit_length())
            if found is None:
                found = self._from_nearest(num_requests)
            if found is None:
                return None
            self._estimates[num_requests] = found.estimate(num_requests, self._now)
        return self._estimates[num_requests]

    def needs_plain(self, num_requests: int) -> bool:
        """Whether only a plain step can tell what one costs at this batch size."""
        found = self.estimate(num_requests)
        return found is None or found.plain_error > _ENOUGH

    def _start(self, num_requests: int, num_drafted: int, seconds: float) -> bool:
        """Open a class; False while there is too little to start from, or nothing left to do."""
        key = num_requests.bit_length()
        guess = self._from_nearest(num_requests)
        if guess is not None:
            self._classes[key] = guess
            return True
        if num_drafted:
            return False
        first = self._first.setdefault(key, [])
        first.append(seconds)
        if len(first) == _FIRST_STEPS:
            plain = statistics.median(first)
            token = plain * _first_token(num_requests)
            errors = (
                0.8 * _FIRST_NOISE * plain,
                _FIRST_OVERHEAD * plain,
                token,
                _FIRST_REQUEST * plain / num_requests,
            )
            state = (plain, 0.0, token, 0.0)
            self._classes[key] = _SizeClass(num_requests, state, errors, self._now)
        return False

    def _from_nearest(self, num_requests: int) -> _SizeClass | None:
        key = num_requests.bit_length()
        if not self._classes:
            return None
        nearest = min(
            self._classes, key=lambda known: (abs(known - key), -self._classes[known].updated)
        )
        known = self._classes[nearest]
        old = known.state[0]
        # Requests may be free, or each may take as long as the others.
        bounds = sorted((old, old * num_requests / known.num_requests))
        more = num_requests - known.num_requests
        plain = old + more * (known.state[2] + known.state[3])
        plain = min(bounds[1], max(bounds[0], plain))
        # Rows that fill a core up cost nothing, further ones do: more requests, dearer tokens.
        first = plain * _first_token(num_requests)
        floor = 0.6 * first if more > 0 or known.guesses_token else 0.0
        token = max(known.state[2], floor)
        state = (plain, known.state[1] * plain / old, token, 0.0)
        errors = (
            (0.15 + 0.1 * abs(nearest - key)) * plain,
            0.05 * plain,
            0.5 * max(token, first),
            0.2 * plain / num_requests,
        )
        is_known = not known.guesses_token and known.state[2] >= floor
        return _SizeClass(num_requests, state, errors, self._now, token_is_known=is_known)
