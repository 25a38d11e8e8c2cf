//! What a build without the feature `rpc` says.

use sd_backend::{Device, Error, RpcServer, RpcServerOptions};

#[test]
fn the_missing_feature_is_named() {
    for error in [
        Device::select("rpc://127.0.0.1:1").unwrap_err(),
        RpcServer::bind(&RpcServerOptions::default()).unwrap_err(),
    ] {
        assert!(matches!(error, Error::MissingBackend { .. }), "{error}");
        assert!(error.to_string().contains("feature `rpc`"), "{error}");
    }
}
