"""An Envoy external-processing filter that coordinates disaggregated multimodal inference."""
