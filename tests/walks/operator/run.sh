#!/usr/bin/env bash
# the launch script of the operator's run
ROLLOUT_ARGS=(--rollout-temperature 0.8 --rollout-top-p 0.95)
python3 train.py "${ROLLOUT_ARGS[@]}" --advantage-estimator grpo
