"""Profiles and verdicts for people and machines: functions yield lines, hooks print them."""
