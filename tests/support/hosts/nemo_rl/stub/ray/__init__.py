def remote(runtime_env=None):
    def make(cls):
        return type("ActorClass", (), {"of": cls, "_default_options": {"runtime_env": runtime_env}})

    return make
