"""The demo line: boards rendered, small experts trained, the closing report."""
