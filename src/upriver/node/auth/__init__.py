"""Who may connect and what they may do: the users file, SASL and SCRAM, the queue and the throttle of logins."""
