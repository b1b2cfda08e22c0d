"""``python -m megatron_rc``: the same as the ``megatron-rc`` command."""

from megatron_rc.cli import main

if __name__ == "__main__":
    main()
