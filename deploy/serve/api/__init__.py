"""What clients send and are sent: requests, answers, events, errors."""
