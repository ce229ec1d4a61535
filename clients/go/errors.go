package kvsidecar

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is a call that failed. Reason is stable and meant for programs, such as "INVALID_REQUEST" or "OVERLOADED"
// (clients/python/kvsidecar/errors has all reasons). Message is one sentence for people.
type Error struct {
	Code    codes.Code
	Reason  string
	Domain  string
	Message string
}

func (e *Error) Error() string { return e.Reason + ": " + e.Message }

// An error without details comes from gRPC on either side, not from the worker.
var reasonOf = map[codes.Code]string{
	codes.Canceled:         "CANCELLED",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
	codes.Unavailable:      "UNAVAILABLE",
	codes.InvalidArgument:  "INVALID_REQUEST",
}

// fromRPC reads google.rpc.ErrorInfo from a call's status (https://google.aip.dev/193). Nil stays nil.
func fromRPC(err error) error {
	if err == nil {
		return nil
	}
	said := status.Convert(err)
	found := &Error{Code: said.Code(), Reason: reasonOf[said.Code()], Message: said.Message()}
	for _, detail := range said.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			found.Reason, found.Domain = info.GetReason(), info.GetDomain()
		}
	}
	if found.Reason == "" {
		found.Reason = "INTERNAL"
	}
	return found
}
