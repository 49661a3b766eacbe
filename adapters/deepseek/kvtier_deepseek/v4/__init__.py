"""DeepSeek-V4: windowed attention over compressed history."""
