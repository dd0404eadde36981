"""SGLang's own routes: generate, and what its operators and benches use."""
