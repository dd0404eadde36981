"""Sources are where adapters come from besides folders: object stores and the Hub, with a cache on disk before them."""
