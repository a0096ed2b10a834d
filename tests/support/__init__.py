"""What the tests play against: a scripted Envoy, recording engines, an independent reading of Envoy's protos."""
