"""What is passed along inside the scheduler: Req, ScheduleBatch, ForwardMode. Imports: cache, messages, events."""
