"""Rules that scale the learning rate, each deciding once per rollout; `rule.RULES` has them by name.

length_decay halves the learning rate at fixed intervals, which follow from the rollout at which responses surged in
length. With its defaults, for a surge after the detector's warm-up, and ``lengths`` the mean lengths of the rollouts::

    fast = slow = before = 0.0  # logs of a fast and a slow geometric mean
    run, surge, scales = 0, None, []

    for t, length in enumerate(lengths, 1):
        old = slow / (1 - 0.98 ** (t - 1)) if t > 1 else 0.0

        fast += 0.2 * (math.log(length) - fast)
        slow += 0.02 * (math.log(length) - slow)
        usual = before if run else slow / (1 - 0.98**t)  # a run keeps the mean before it

        longer = t > 20 and math.exp(fast / (1 - 0.8**t) - usual) > 1.475
        before = before if run else old
        run = run + 1 if longer else 0

        surge = t - 11 if run == 12 and surge is None else surge  # where the run began
        scales.append(1.0 if surge is None else max(0.5 ** (t // (surge * 9 // 5)), 0.1))

mismatch lowers it while a rollout says little about the gradient: sqrt(ESS / 0.5), between 0.1 and 1, by default.
`surge` has the detector, and `scale` puts a rule on Megatron's scheduler.
"""
