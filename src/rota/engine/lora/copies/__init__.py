"""How adapters get from host memory to their places on the device, while steps run."""
