"""Who asks what when: scenarios in TOML, read by the simulator and by the bench client alike."""
