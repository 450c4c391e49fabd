"""How receivers are told what waits for them in the outbox: an MQTT broker, a web address."""
