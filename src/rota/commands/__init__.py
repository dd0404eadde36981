"""The commands of `rota`, one file each: they know everyone, and nobody knows them."""
