"""Model families, one file each: the spec, the layers, the forward pass, and what Rota cannot serve."""
