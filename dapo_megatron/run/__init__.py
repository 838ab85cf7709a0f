"""One run: this rank while it is in it (context), what it imports (libraries), train and evaluate
(session), from the config to what the loop works with (build), its folder, and what is written
down of it (record)."""
