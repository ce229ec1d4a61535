package kvsidecar

import "google.golang.org/protobuf/proto"

// codec is what newer versions of gRPC use by themselves; Debian 12's marshals with a package that is too old for
// generated code of today.
type codec struct{}

func (codec) Marshal(message any) ([]byte, error) { return proto.Marshal(message.(proto.Message)) }

func (codec) Unmarshal(data []byte, message any) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func (codec) Name() string { return "proto" }
