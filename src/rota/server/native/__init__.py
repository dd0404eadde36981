"""SGLang's own routes: generate, and the routes of its operators and benchmarks."""
