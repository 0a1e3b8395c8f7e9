"""How often to save: the intervals of Young and Daly, and what an interval costs a job. Pure (H9).

A job works for `interval_s`, saves for `cost_s`, and works again. Failures come at random, on average every `mtbf_s`. After a failure the
job needs `restart_s` before it works again, from its last checkpoint. All times are in seconds.

Sources:
- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, p. 530-531.
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3),
  2006, p. 303-312: the higher-order interval, and the expected time of a job whose failures are Poisson, also while it saves or restarts.
"""

import math


def compute_young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval: sqrt(2 cost mtbf)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def compute_daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, of higher order; the MTBF if a checkpoint takes twice as long as that."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return compute_young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def compute_overhead(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the time for checkpoints, lost work and restarts, as a share of the work.

    It is infinite if the job hardly gets on.
    Daly: a job takes mtbf e^(restart / mtbf) (e^((interval + cost) / mtbf) - 1) for each interval of work.
    """
    try:
        taken_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return taken_s / interval_s - 1


def compute_lost_s(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the time that a failure undoes, on average: from the last complete checkpoint to the failure.

    It is the mean of the exponential distribution, given that the failure comes before the next checkpoint is complete.
    """
    period_s = interval_s + cost_s
    share = period_s / mtbf_s
    if share < 1e-4:  # The difference below loses all its digits.
        return period_s * (0.5 - share / 12)
    return mtbf_s - (period_s / math.expm1(share) if share < 700 else 0.0)
