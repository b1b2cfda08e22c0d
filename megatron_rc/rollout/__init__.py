"""Engines that sample: the only folder that talks to one."""
