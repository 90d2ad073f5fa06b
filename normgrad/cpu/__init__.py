"""The backend ``cpu``. ``docs/dev/architecture.md`` says what is in which folder."""
