"""vLLM's command line and engine arguments: what each of them means here. docs/compatibility.md shows the table."""
