"""Pure decisions: views and `now` in, verdicts out. No policy knows another."""
