"""Model families: the spec, the layers, the forward pass, and what Rota cannot serve."""
