"""The commands of `rota`, one file each: they import every room, and no room imports them."""
