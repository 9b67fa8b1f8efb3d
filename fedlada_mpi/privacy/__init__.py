"""What keeps clients and silos private: differential privacy of clients (``--dp``)."""
