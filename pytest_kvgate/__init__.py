"""pytest-kvgate: gate query-selected KV paging on your model before anyone builds it."""
