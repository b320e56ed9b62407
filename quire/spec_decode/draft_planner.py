"""How many drafts each row of a step verifies: as many as are expected to pay for the time that they take."""

import numpy as np

from quire.messages.speculation import DraftProfile, DraftStats

MIN_GAIN = 1.02  # expected tokens per second, relative to a step without drafts: estimates are not exact
DECAY = 0.85  # of a row's acceptance, with each draft
PRIOR, PRIOR_TOKENS = 0.7, 4.0  # a new request's acceptance, as if so many tokens had been seen, before any is known
ENGINE_DECAY = 0.99  # of the acceptance of all rows, with which requests begin
# A row, or a step of equal rows, that was planned without drafts for so many plans gets some: texts change.
PROBE_ROW, PROBE_STEP = 16, 64
# After so many plans without any match, a proposer that may rest looks in every fourth, and after more in every eighth.
PATIENCE, LOOK, FEW_LOOKS = 8, 4, 64
PAUSE = 8  # plans for which it rests where drafts do not pay
# Costs were measured at start-up, when anything may have disturbed them. Where by these even right drafts do not pay,
# some are tried for TRIAL plans after so many without, and after twice as many each further time.
TRIAL, FIRST_TRIAL, LAST_TRIAL = 8, 32, 1024
PLAIN_EVERY = 256  # plans with drafts, after which two have none: both kinds of steps are timed
FRESH = 8  # steps for which the time of one without drafts says how long the next would take
TIME_WEIGHT = 0.15  # of one step's time
FREE_TOKENS = 64  # a step takes equally long up to here, where its costs were not measured


class DraftPlanner:
    """By row: how many drafts were found, and the decaying counts of those verified and accepted. Nothing here can
    change a text, only how fast it comes."""

    def __init__(
        self,
        num_rows: int,
        num_drafts: int,
        max_tokens: int,
        adaptive: bool = False,
        profile: DraftProfile | None = None,
    ) -> None:
        """`num_drafts`: the most that a row verifies. Unless `adaptive`, every row that decodes gets that many."""
        profile = profile or DraftProfile()
        self.num_drafts, self.adaptive = num_drafts, adaptive
        self.finds, self.rests = profile.finds, profile.rests
        self.sizes = [size for size in profile.sizes if size <= num_drafts] if adaptive else []
        self.uniform = bool(self.sizes)  # only steps in which all rows have equally many are captured
        self.num_found = np.zeros(num_rows, np.int64)
        self._accepted = np.zeros(num_rows)
        self._verified = np.ones(num_rows)
        self._all = np.array([PRIOR, 1.0]) * PRIOR_TOKENS  # of all rows
        self._idle = np.zeros(num_rows, np.int64)  # plans since the row had drafts
        self._idle_steps = 0
        self._misses = 0  # plans in which no row had a match
        self._resting = 0  # plans for which it is decided that the proposer rests
        self._column, self._numbers = np.arange(num_drafts)[:, None], np.arange(1, num_rows * num_drafts + 1)
        plain, drafted = profile.plain, profile.drafted or profile.plain
        larger = tuple((tokens, seconds) for tokens, seconds in drafted if not plain or tokens > plain[-1][0])
        self._plain, self._drafted = _seconds(plain + larger, max_tokens), _seconds(drafted, max_tokens)
        # By length in bits of the number of rows: how much longer drafts make a step than was measured.
        sizes = max_tokens.bit_length() + 1
        self._factors, self._trials, self._suspended = [1.0] * sizes, [FIRST_TRIAL] * sizes, [0] * sizes
        self._pace, self._steps_since, self._rested = (0, 1.0), 0, False  # of the last step without drafts
        self._drafted_plans = 0
        self._draft_tokens = 0
        self._histogram = np.zeros(1 + num_drafts, np.int64)  # drafts by tokens accepted

    @property
    def stats(self) -> DraftStats:
        return DraftStats(self._draft_tokens, tuple(self._histogram.tolist()))

    def add_rows(self, rows: list[int]) -> None:
        """Requests have entered these rows."""
        self.num_found[rows] = self._idle[rows] = self._resting = 0
        self._accepted[rows], self._verified[rows] = PRIOR_TOKENS * self._all[0] / self._all[1], PRIOR_TOKENS

    def found(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """The proposer found so many drafts for rows."""
        self.num_found[rows] = counts
        if counts.any():
            self._resting = 0

    def goes_on_resting(self) -> bool:
        """Whether the next plan has no drafts, without a look at its rows: most steps of small models that drafts do
        not help are short enough for that to matter."""
        if self._resting:
            self._resting -= 1
            return True
        return False

    def plan(
        self, rows: np.ndarray, certain: np.ndarray, decodes: np.ndarray, room: np.ndarray, max_tokens: int
    ) -> np.ndarray | None:
        """Drafts of rows that compute `certain` tokens and decode or not, with `room` before the limit, in a step of
        up to `max_tokens`. None: the proposer may rest."""
        decodes = decodes & (certain > 0)
        most = np.where(decodes, room, 0)
        if not self.adaptive:
            return most
        base, count = int(certain.sum()), int(decodes.sum())
        longest = min(max_tokens, len(self._plain) - 1)
        if not count or base >= longest:
            return np.zeros_like(certain)
        pace = MIN_GAIN * count / self._plain[base]  # tokens per second that drafts have to beat
        # By number of drafts, from 1 on. Where even right ones do not pay there are none.
        drafted = self._drafted[base + 1 : 1 + min(base + count * self.num_drafts, longest)]
        seconds = np.maximum(drafted * self._factors[count.bit_length()], self._plain[base])
        if ((count + self._numbers[: len(seconds)]) / seconds).max() <= pace:
            if not self._tries(count.bit_length()):
                self.num_found[:] = 0  # of what it does not see
                if self.rests:
                    self._resting = PAUSE - 1
                    self._suspended[count.bit_length()] += self._resting
                    return None
                return np.zeros_like(certain)
            pace = 0.0
        self._drafted_plans += 1
        if self._drafted_plans > PLAIN_EVERY:
            self._drafted_plans %= PLAIN_EVERY + 2
            return np.zeros_like(certain)
        if self.finds:
            most = np.minimum(most, self.num_found[rows])
            self._misses = 0 if most.any() else self._misses + 1
            if self.rests and self._misses > PATIENCE:
                self._resting = (LOOK if self._misses <= FEW_LOOKS else 2 * LOOK) - 1
                self._misses += self._resting
        gains = self._gains(rows, most)
        if self.uniform:
            return self._plan_equal(count, gains, seconds, pace) * (certain > 0) if base == count else 0 * certain
        chosen = self._plan_each(count, most, gains, seconds, pace)
        probed = (chosen == 0) & (most > 0) & (self._idle[rows] >= PROBE_ROW)
        chosen[probed] = 1
        self._idle[rows] = np.where(chosen > 0, 0, self._idle[rows] + 1)
        return chosen

    def _tries(self, size: int) -> bool:
        """Whether drafts that do not pay are planned nevertheless."""
        self._suspended[size] += 1
        if self._suspended[size] > self._trials[size] + TRIAL:
            self._suspended[size], self._trials[size] = 0, min(2 * self._trials[size], LAST_TRIAL)
        return self._suspended[size] > self._trials[size]

    def took(self, num_rows: int, num_drafts: int, rested: bool, seconds: float) -> None:
        """A step of rows that all decode took so long. Only compared with one just before it: texts grow, and other
        work comes and goes."""
        # A proposal may be timed with the step after it: steps count that follow one like them.
        alike, self._rested = rested == self._rested, rested
        if not alike or num_rows + num_drafts >= len(self._plain):
            return
        size = num_rows.bit_length()
        if not num_drafts:
            self._pace, self._steps_since = (size, seconds / self._plain[num_rows]), 0
            return
        self._steps_since += 1
        if self._pace[0] == size and self._steps_since <= FRESH:
            expected = max(self._drafted[num_rows + num_drafts], self._plain[num_rows]) * self._pace[1]
            found = min(max(seconds / expected, 0.1), 10.0)
            self._factors[size] = self._factors[size] ** (1 - TIME_WEIGHT) * found**TIME_WEIGHT

    def _gains(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[drafts, rows]: the probability that a draft is accepted, with all before it; 0 where there is none."""
        gains = np.empty((self.num_drafts, len(rows)), np.float32)  # which sorts twice as fast as float64
        gains[0] = np.minimum(self._accepted[rows] / self._verified[rows], 1.0)
        for j in range(1, self.num_drafts):
            np.multiply(gains[j - 1], gains[0], out=gains[j])
        gains *= self._column < most
        return gains

    def _plan_each(
        self, count: int, most: np.ndarray, gains: np.ndarray, seconds: np.ndarray, pace: float
    ) -> np.ndarray:
        """The likeliest drafts of all rows, as many as give the most tokens per second."""
        likeliest = np.sort(gains, axis=None)[::-1][: min(int(most.sum()), len(seconds))]
        speed = (count + np.cumsum(likeliest)) / seconds[: len(likeliest)]
        best = int(speed.argmax()) if len(speed) else 0
        if not len(speed) or speed[best] <= pace:
            return np.zeros_like(most)
        chosen: np.ndarray = (gains >= max(likeliest[best], 1e-9)).sum(axis=0)
        return chosen

    def _plan_equal(self, count: int, gains: np.ndarray, seconds: np.ndarray, pace: float) -> int:
        """The number of drafts for every row, where all decode."""
        speed = {
            size: (count + gains[:size].sum()) / seconds[count * size - 1]
            for size in self.sizes
            if count * size <= len(seconds) and count * (1 + size) / seconds[count * size - 1] > pace
        }
        size = max(speed, key=lambda size: speed[size], default=0)
        if size and speed[size] <= pace and (self._idle_steps < PROBE_STEP or not gains.any()):
            size = 0
        self._idle_steps = 0 if size else self._idle_steps + 1
        return size

    def observe(self, rows: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Rows verified so many drafts, and accepted so many of them."""
        if not drafts.all():
            had = drafts > 0
            rows, drafts, accepted = rows[had], drafts[had], accepted[had]
        if not len(rows):
            return
        self._draft_tokens += int(drafts.sum())
        self._histogram += np.bincount(accepted, minlength=1 + self.num_drafts)
        if self.adaptive:
            verified = np.minimum(accepted + 1, drafts)  # those behind the first wrong one say nothing
            self._accepted[rows] = DECAY * self._accepted[rows] + accepted
            self._verified[rows] = DECAY * self._verified[rows] + verified
            self._all = ENGINE_DECAY * self._all + (accepted.sum(), verified.sum())
            self._idle[rows[accepted > 0]] = PROBE_ROW  # a probe that was right is followed by another


def _seconds(measured: tuple[tuple[int, float], ...], max_tokens: int) -> np.ndarray:
    """By number of tokens of a step. Beyond those measured a token costs what it does on average at the last."""
    tokens, seconds = zip(*(measured or [(FREE_TOKENS, 1.0)]), strict=True)
    counts = np.arange(max_tokens + 1)
    table: np.ndarray = np.interp(counts, tokens, seconds)
    table[tokens[-1] :] = seconds[-1] * counts[tokens[-1] :] / tokens[-1]
    return np.maximum.accumulate(table)
